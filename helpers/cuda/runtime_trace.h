// The address trace: sectors and bank conflicts. Included by runtime.cpp only, inside its anonymous namespace.
#pragma once

// A request is one instruction executed by the lanes of a warp together: the k-th time that each lane comes to it after
// the last barrier that all of them passed. (A lane that left a loop early has waited for the others there.)
void summarise(Worker* w, std::map<std::tuple<uint64_t, int, int, int>, Access>& totals) {
  struct Lane {
    uint64_t address;
    uint32_t size, number;
  };
  for (unsigned warp = 0; warp * WARP < w->threads; warp++) {
    std::map<std::tuple<uint64_t, int, int, int>, std::map<std::pair<uint32_t, uint32_t>, std::vector<Lane>>> requests;
    for (unsigned i = warp * WARP; i < std::min(w->threads, (warp + 1) * WARP); i++) {
      std::unordered_map<uint64_t, std::pair<uint32_t, uint32_t>> times;  // barriers passed, times since then
      auto& log = *w->stacks.fiber(i)->log;
      for (auto& e : log) {
        auto& all = requests[{e.pc, e.kind, e.space, e.range}];
        auto& k = times[e.pc * 4 + e.kind];
        k = {e.met, k.first == e.met ? k.second + 1 : 0};
        all[k].push_back({e.address, e.size, i % WARP});
      }
      log.clear();
    }
    for (auto& [key, all] : requests) {
      Access& total = totals[key];
      total.pc = in_library(w->launch, std::get<0>(key));
      total.kind = std::get<1>(key), total.space = std::get<2>(key), total.range = std::get<3>(key);
      for (auto& [time, lanes] : all) {
        total.requests++;
        std::set<uint64_t> sectors;
        uint32_t widest = 0;
        for (auto& x : lanes) {
          total.lanes++, total.bytes += x.size, widest = std::max(widest, x.size);
          for (uint64_t s = x.address / 32; s <= (x.address + x.size - 1) / 32; s++) sectors.insert(s);
        }
        total.size = widest;
        total.sectors += sectors.size();
        // Shared memory serves 32 banks of 4 bytes at a time: a warp's 8-byte accesses go in two halves, 16-byte ones
        // in four quarters; within each, distinct words of one bank need a pass each.
        unsigned group = widest >= 16 ? 8 : widest >= 8 ? 16 : 32;
        for (unsigned from = 0; from < WARP; from += group) {
          std::set<uint64_t> words[WARP];
          size_t most = 0;
          for (auto& x : lanes) {
            if (x.number / group != from / group) continue;
            for (uint64_t word = x.address / 4; word <= (x.address + x.size - 1) / 4; word++)
              words[word % WARP].insert(word);
          }
          for (auto& bank : words) most = std::max(most, bank.size());
          total.passes += most, total.least_passes += most > 0;
        }
      }
    }
  }
}

