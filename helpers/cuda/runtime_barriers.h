// Barriers of blocks and warps, and what warps exchange at them. Included by runtime.cpp only, inside its anonymous namespace.
#pragma once

unsigned lane_of(const Fiber* f) { return f->linear % WARP; }

unsigned exists(const Worker* w, unsigned warp) {  // lanes that the block has in this warp
  unsigned n = std::min(WARP, w->threads - warp * WARP);
  return n == WARP ? ~0u : (1u << n) - 1;
}

struct Races;
void warp_met(Worker* w, unsigned warp, unsigned lanes);
void block_met(Worker* w);

void release_block(Worker* w) {
  if (w->block_in_if && w->live < w->threads) {  // threads went past a barrier in an `if`, and then returned
    unsigned i = 0;
    while (w->stacks.fiber(i)->state != FINISHED) i++;
    if (Failure* out = first_failure(w, w->stacks.fiber(i), DEADLOCK)) {
      out->line = w->block_line, out->waiting = w->at_block;
      snprintf(out->text, sizeof out->text, "left");
    }
    return;
  }
  for (unsigned i = 0; i < w->threads; i++) {
    Fiber* f = w->stacks.fiber(i);
    if (f->state == AT_BLOCK) f->state = READY, f->result = w->total, f->met++;
  }
  w->at_block = w->total = 0;
  block_met(w);
}

enum Op { SHUFFLE_OP, BALLOT, MATCH, ADD, SMIN, SMAX, UMIN, UMAX, AND, OR, XOR, SYNC, TOGETHER };

uint64_t combine(int op, uint64_t a, uint64_t b) {
  auto x = (uint32_t)a, y = (uint32_t)b;
  switch (op) {
    case ADD: return uint32_t(x + y);
    case SMIN: return (uint32_t)std::min((int32_t)x, (int32_t)y);
    case SMAX: return (uint32_t)std::max((int32_t)x, (int32_t)y);
    case UMIN: return std::min(x, y);
    case UMAX: return std::max(x, y);
    case AND: return x & y;
    case OR: return x | y;
    default: return x ^ y;
  }
}

// If every lane of `mask` that still runs has arrived, work out what each gets and let them go on.
bool try_warp(Worker* w, unsigned warp, unsigned mask) {
  unsigned arrived = w->waiting[warp], gone = w->gone[warp] | ~exists(w, warp);
  if (((arrived | gone) & mask) != mask) return false;
  unsigned lanes = mask & arrived & ~gone;
  Fiber* first = w->stacks.fiber(warp * WARP + __builtin_ctz(lanes));
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    if (f->mask != mask) return false;
    if (f->operation != first->operation || (f->line != first->line && f->operation != SYNC))
      fail_at_line(w->running, MIXED_BARRIERS, first->line, "warp", f->line);
  }
  if (first->operation == TOGETHER) {
    if (lanes != ~0u) {
      const char* where = exists(w, warp) == ~0u ? "have returned" : "are not in the block";
      fail_at_call(w, first, DEADLOCK, "%s for the 32 lanes of its warp, and %u of them %s", first->name,
                   WARP - __builtin_popcount(lanes), where);
    }
    void* of_lanes[WARP];
    for (unsigned lane = 0; lane < WARP; lane++) of_lanes[lane] = (void*)w->stacks.fiber(warp * WARP + lane)->value;
    first->together(of_lanes);
  }
  uint64_t all = 0;
  bool begun = false;
  for (unsigned m = lanes; m; m &= m - 1) {
    unsigned lane = __builtin_ctz(m);
    Fiber* f = w->stacks.fiber(warp * WARP + lane);
    if (f->operation == BALLOT) all |= (uint64_t)(f->value != 0) << lane;
    else if (f->operation >= ADD && f->operation <= XOR) all = begun ? combine(f->operation, all, f->value) : f->value;
    begun = true;
  }
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    f->result = all;
    if (f->operation == SHUFFLE_OP) {
      bool there = f->source >= 0 && f->source < (int)WARP && (lanes >> f->source & 1);
      f->result = there ? w->stacks.fiber(warp * WARP + f->source)->value : 0x0101010101010101 * POISON[w->launch->order];
    } else if (f->operation == MATCH) {
      f->result = 0;
      for (unsigned o = lanes; o; o &= o - 1) {
        unsigned lane = __builtin_ctz(o);
        f->result |= (uint64_t)(w->stacks.fiber(warp * WARP + lane)->value == f->value) << lane;
      }
    }
  }
  bool whole = (lanes | gone) == ~0u;
  for (unsigned m = lanes; m; m &= m - 1) {
    Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
    f->state = READY, f->met += whole;
  }
  w->waiting[warp] &= ~lanes;
  if (first->operation != TOGETHER) warp_met(w, warp, lanes);  // fragments order no other access to memory
  return true;
}

uint64_t meet(unsigned mask, uint64_t value, int source, int op, int line) {
  Fiber* f = self();
  Worker* w = f->worker;
  unsigned warp = f->linear / WARP, lane = lane_of(f);
  if (!(mask >> lane & 1)) fail_at_line(f, NOT_IN_MASK, line);
  f->line = line, f->mask = mask, f->operation = op, f->value = value, f->source = source;
  f->state = AT_WARP;
  w->waiting[warp] |= 1u << lane;
  if (!try_warp(w, warp, mask)) to_worker(f);
  return f->result;
}

void finished(Fiber* f) {
  Worker* w = f->worker;
  unsigned warp = f->linear / WARP;
  f->state = FINISHED;
  w->live--;
  w->gone[warp] |= 1u << lane_of(f);
  for (unsigned m = w->waiting[warp]; m;) {  // a lane that has returned no longer keeps others waiting
    unsigned mask = w->stacks.fiber(warp * WARP + __builtin_ctz(m))->mask;
    try_warp(w, warp, mask);
    m &= ~mask;
  }
  if (w->live && w->at_block == w->live) release_block(w);
}

bool release_active(Worker* w) {  // lanes at __activemask() that no other lane of their warp can still join
  bool any = false;
  for (unsigned warp = 0; warp * WARP < w->threads; warp++) {
    unsigned lanes = w->active[warp];
    if (!lanes) continue;
    int line = w->stacks.fiber(warp * WARP + __builtin_ctz(lanes))->line;
    unsigned group = 0;
    for (unsigned m = lanes; m; m &= m - 1) {
      Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
      if (f->line == line) group |= 1u << __builtin_ctz(m);
    }
    for (unsigned m = group; m; m &= m - 1) {
      Fiber* f = w->stacks.fiber(warp * WARP + __builtin_ctz(m));
      f->result = group, f->state = READY;
    }
    w->active[warp] &= ~group;
    any = true;
  }
  return any;
}
