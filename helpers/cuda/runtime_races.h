// The search for races. Included by runtime.cpp only, inside its anonymous namespace.
#pragma once

// Two accesses to a byte by different threads race when at least one writes, not both are atomic, and nothing orders
// them: no block barrier between them, no warp barrier that both lanes pass, and no chain of fence and atomic.
struct Stamp {  // when and by whom an address was touched
  uint64_t block;
  uint32_t thread, epoch, clock;  // epoch: block barriers passed; clock: warp barriers passed by this lane
  uint64_t pc;
  uint8_t kind, bytes;            // bytes: which of the word's four
};

struct Known {  // what a thread has learned of other blocks through atomics after fences
  std::unordered_map<uint64_t, uint32_t> epochs;    // block -> everything before this epoch
  std::unordered_map<uint64_t, uint64_t> clocks;    // block*1024+thread -> everything before epoch<<32|clock
  void learn(const Known& other) {
    for (auto& [k, v] : other.epochs) epochs[k] = std::max(epochs[k], v);
    for (auto& [k, v] : other.clocks) clocks[k] = std::max(clocks[k], v);
  }
};

using Cell = std::vector<Stamp>;  // of one 4-byte word: its last writer, and a few of its readers since
constexpr size_t READERS = 8;

struct Shadow {
  std::unordered_map<uint64_t, Cell> cells;               // by address of each 4-byte word (global memory)
  std::unordered_map<uint64_t, Cell> shared;              // of the running block's shared memory
  std::unordered_map<uint64_t, Known> released;           // by address of an atomic
  std::unordered_map<uint32_t, Known> threads;            // of the running block
  Known block;                                            // what every thread of the running block knows
  std::map<std::pair<uint64_t, uint64_t>, Race> races;    // by the two instructions
  std::map<std::pair<uint32_t, uint64_t>, std::vector<std::function<void()>>> guesses;  // of the running block: thread, word
  uint32_t epoch = 0;
  std::vector<uint64_t> fenced;                           // by thread: its last fence, as epoch<<32 | clock; 0: none
};

void block_met(Worker* w) {
  if (Shadow* s = w->shadow) {
    s->epoch++;
    for (unsigned t = 0; t < w->threads; t++)  // what each fenced before the barrier, any thread may release after it
      if (s->fenced[t]) s->block.clocks[w->block_number * MOST_THREADS + t] = s->fenced[t];
    for (auto& [thread, known] : s->threads) s->block.learn(known);
    s->threads.clear();
  }
}

void warp_met(Worker* w, unsigned warp, unsigned lanes) {
  if (!w->shadow) return;
  uint32_t joint[WARP] = {};
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    for (unsigned l = 0; l < WARP; l++) joint[l] = std::max(joint[l], f->clock[l]);
  }
  for (unsigned m = lanes; m; m &= m - 1) joint[__builtin_ctz(m)]++;  // what came before is known, what follows is not
  Shadow* s = w->shadow;
  Known together;
  bool any = false;
  for (unsigned m = lanes; m; m &= m - 1)
    if (auto it = s->threads.find(warp * WARP + __builtin_ctz(m)); it != s->threads.end()) together.learn(it->second), any = true;
  for (unsigned m = lanes; m; m &= m - 1) {
    unsigned lane = __builtin_ctz(m);
    Fiber* f = w->stacks.fiber(warp * WARP + lane);
    for (unsigned l = 0; l < WARP; l++) f->clock[l] = joint[l];
    if (any) s->threads[warp * WARP + lane].learn(together);
  }
}

bool ordered(Worker* w, Fiber* f, const Stamp& before) {
  Shadow* s = w->shadow;
  if (before.block == w->block_number) {
    if (before.thread == f->linear || before.epoch < s->epoch) return true;
    if (before.thread / WARP == f->linear / WARP && f->clock[before.thread % WARP] > before.clock) return true;
  }
  uint64_t key = before.block * MOST_THREADS + before.thread, when = (uint64_t)before.epoch << 32 | before.clock;
  auto knows = [&](const Known& k) {
    auto e = k.epochs.find(before.block);
    if (e != k.epochs.end() && before.epoch < e->second) return true;
    auto c = k.clocks.find(key);
    return c != k.clocks.end() && when < c->second;
  };
  if (knows(s->block)) return true;
  auto own = s->threads.find(f->linear);
  return own != s->threads.end() && knows(own->second);
}

void note_race(Worker* w, Fiber* f, const Stamp& before, const Stamp& now, uint64_t address, Space space, int range) {
  Launch* l = w->launch;
  uint64_t pc = in_library(l, now.pc), other = in_library(l, before.pc);
  Race& r = w->shadow->races[{std::min(pc, other), std::max(pc, other)}];
  if (r.count++) return;
  auto index = [&](uint64_t n) {
    U3 g = l->grid;
    return U3{uint32_t(n % g.x), uint32_t(n / g.x % g.y), uint32_t(n / ((uint64_t)g.x * g.y))};
  };
  r.pc = pc, r.other_pc = other;
  r.kind = now.kind, r.other_kind = before.kind;
  r.space = space, r.range = range, r.address = address;
  r.block = w->block, r.other_block = index(before.block);
  r.thread = f->linear, r.other_thread = before.thread;
}

// A thread that reads a word beside others' atomics races with them, unless what it does to that word next is to compare
// and swap: then what it read was a guess, which the atomic checks. Until then the race waits here.
void settle(Shadow* s, std::pair<uint32_t, uint64_t> where, bool checked) {
  auto it = s->guesses.find(where);
  if (it == s->guesses.end()) return;
  auto noted = std::move(it->second);
  s->guesses.erase(it);
  if (!checked)
    for (auto& note : noted) note();
}

void settle_all(Shadow* s) {
  while (!s->guesses.empty()) settle(s, s->guesses.begin()->first, false);
}

void search_races(Worker* w, Fiber* f, uint64_t address, size_t size, Kind kind, uint64_t pc, Space space, int range) {
  Shadow* s = w->shadow;
  Stamp now{w->block_number, f->linear, s->epoch, f->clock[lane_of(f)], pc, (uint8_t)kind, 0};
  auto& cells = space == SHARED ? s->shared : s->cells;
  for (uint64_t word = address / 4; word <= (address + size - 1) / 4; word++) {
    uint64_t from = std::max(address, word * 4) - word * 4, to = std::min(address + size, word * 4 + 4) - word * 4;
    now.bytes = uint8_t((1u << to) - (1u << from));
    Cell& cell = cells[word];
    settle(s, {f->linear, word}, kind == ATOMIC && f->compares);
    size_t readers = 0;
    for (auto& before : cell) {
      readers += before.kind == READ;
      bool harmless = (kind == READ && before.kind == READ) || (kind == ATOMIC && before.kind == ATOMIC);
      if (!(before.bytes & now.bytes) || harmless || ordered(w, f, before)) continue;
      auto note = [=] { note_race(w, f, before, now, address, space, range); };
      bool own = kind == READ && before.kind == ATOMIC;
      bool other = kind == ATOMIC && before.kind == READ && before.block == now.block;
      if (own || other) s->guesses[{own ? f->linear : before.thread, word}].push_back(note);
      else note();
    }
    auto superseded = [&](Stamp& before) {
      bool mine = before.block == now.block && before.thread == now.thread && before.kind == READ;
      if (kind != READ || mine) before.bytes &= ~now.bytes;
      return before.bytes == 0;
    };
    cell.erase(std::remove_if(cell.begin(), cell.end(), superseded), cell.end());
    if (kind == READ && readers >= READERS) {  // forget the oldest reader
      auto oldest = std::find_if(cell.begin(), cell.end(), [](const Stamp& r) { return r.kind == READ; });
      if (oldest != cell.end()) cell.erase(oldest);
    }
    cell.push_back(now);
  }
  if (kind == ATOMIC) {  // acquire what was released here, and release what came before this thread's last fence
    Known& here = s->released[address];
    Known& mine = s->threads[f->linear];
    mine.learn(here);
    if (uint64_t fence = s->fenced[f->linear]) {
      here.learn(mine);
      here.learn(s->block);
      here.epochs[w->block_number] = std::max(here.epochs[w->block_number], uint32_t(fence >> 32));
      here.clocks[w->block_number * MOST_THREADS + f->linear] = fence;
    }
  }
}

