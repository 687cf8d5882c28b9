// Random traces through the placing allocator over host memory, against a model that shares no code with it:
// blocks in use by address. Compiled with csrc/placing/placing.cpp by fuzz/placing.py.
//
//     placing_traces FIRST COUNT        traces of these seeds; prints outcomes with their counts
//
// A trace that breaks a rule ends the program with a line that names the seed.
#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

extern "C" {
const char* sn_placing_open(const char*, int64_t);
void sn_placing_close();
void* sn_placing_allocate(int64_t, int, void*);
int sn_placing_release(void*);
void* sn_placing_malloc(ssize_t, int, void*);
void sn_placing_record_stream(void*, void*);
void sn_placing_trim();
int64_t sn_placing_new_pool(int);
void sn_placing_forget(int64_t);
void sn_placing_give_back(int64_t);
int sn_placing_begin(int64_t, int64_t, void*);
int64_t sn_placing_enter(int64_t);
int64_t sn_placing_rows(int64_t, int64_t, int64_t*, int64_t);
int sn_placing_place(int64_t, int64_t, const int64_t*, int64_t);
void sn_placing_step(int64_t, int64_t, int64_t*);
void sn_placing_statistics(int, int64_t*);
}

namespace {

uint64_t seed_now = 0;
std::map<const char*, uint64_t> outcomes;

#define MUST(what)                                                                      \
  do {                                                                                  \
    if (!(what)) {                                                                      \
      std::printf("seed %llu: line %d: not %s\n", (unsigned long long)seed_now, __LINE__, #what); \
      std::fflush(stdout);                                                              \
      std::abort();                                                                     \
    }                                                                                   \
  } while (0)

struct Held {
  int64_t size;
  int device;
  uint64_t tag;
};

// What is planned to happen in one step: an allocation of a size, or the free of an earlier one of the step.
struct Event {
  int64_t size;  // 0 for a free
  size_t which;
};

class Trace {
 public:
  Trace(uint64_t seed, bool limited) : random_(seed) {
    writes_ = draw(8) == 0;
    devices_ = draw(4) ? 1 : 2;
    limit_ = !limited || draw(5) ? 0 : static_cast<int64_t>(1 + draw(40)) << 22;
    largest_ = int64_t{1} << (9 + draw(17));
    MUST(sn_placing_open("host", limit_) == nullptr);
    MUST(sn_placing_open("host", 0) != nullptr);
  }

  void run() {
    const size_t pools = 1 + draw(2);
    for (size_t i = 0; i < pools; ++i) pools_.push_back(sn_placing_new_pool(static_cast<int>(draw(devices_))));
    const size_t kinds = 1 + draw(2);
    for (size_t i = 0; i < kinds; ++i) scripts_.push_back(script());
    const size_t steps = 2 + draw(6);
    for (size_t i = 0; i < steps; ++i) {
      outside(draw(6));
      step(draw(pools), draw(kinds));
      if (!draw(12)) sn_placing_trim();
      if (!draw(20)) sn_placing_give_back(pools_[draw(pools)]);
    }
    if (!draw(3)) sn_placing_forget(pools_[draw(pools)]);
    end();
  }

  // The same step again and again, everything freed in it: each allocation has its place.
  void repeat() {
    int64_t pool = sn_placing_new_pool(0);
    std::vector<Event> events = script();
    int64_t reserved = -1;
    for (int i = 0; i < 4; ++i) {
      if (!begin(pool, 0, nullptr)) break;
      int64_t before = sn_placing_enter(pool);
      std::vector<void*> mine;
      for (const Event& event : events)
        if (event.size)
          mine.push_back(take(event.size, 0, nullptr));
        else if (mine[event.which])
          give(std::exchange(mine[event.which], nullptr));
      sn_placing_enter(before);
      for (void* pointer : mine)
        if (pointer) give(pointer);
      int64_t step[4], now[8];
      sn_placing_step(pool, 0, step);
      sn_placing_statistics(0, now);
      if (i == 0) continue;
      MUST(step[1] == 0 && step[2] == 0 && step[3] == 0);
      MUST(step[0] == static_cast<int64_t>(mine.size()));
      MUST(reserved < 0 || reserved == now[0]);
      reserved = now[0];
    }
    ++outcomes["repeated"];
    pools_ = {pool};
    end();
  }

 private:
  uint64_t draw(uint64_t below) { return random_() % below; }
  int64_t size() { return 1 + static_cast<int64_t>(draw(draw(3) ? 5000 : largest_)); }
  void* stream() { return reinterpret_cast<void*>(draw(4) ? 0 : 64); }

  std::vector<Event> script() {
    std::vector<Event> events;
    std::vector<size_t> alive;
    size_t count = 0;
    for (size_t left = 1 + draw(30); left--;) {
      if (alive.empty() || draw(5) < 3) {
        events.push_back({size(), 0});
        alive.push_back(count++);
      } else {
        size_t at = draw(alive.size());
        events.push_back({0, alive[at]});
        alive.erase(alive.begin() + at);
      }
    }
    return events;
  }

  void* take(int64_t size, int device, void* stream) {
    void* pointer = nullptr;
    if (draw(9)) {
      pointer = sn_placing_allocate(size, device, stream);
    } else {
      try {
        pointer = sn_placing_malloc(size, device, stream);
      } catch (const std::exception&) {
        ++outcomes["raised"];
      }
    }
    if (!pointer) {
      ++outcomes["no memory"];
      MUST(limit_);
      return nullptr;
    }
    auto at = reinterpret_cast<uintptr_t>(pointer);
    MUST(at % 512 == 0);
    auto after = held_.lower_bound(at);
    MUST(after == held_.end() || at + size <= after->first);
    if (after != held_.begin()) {
      auto before = std::prev(after);
      MUST(before->first + before->second.size <= at);
    }
    Held held{size, device, random_()};
    if (writes_) {
      *static_cast<char*>(pointer) = static_cast<char>(held.tag);
      static_cast<char*>(pointer)[size - 1] = static_cast<char>(held.tag);
    }
    held_[at] = held;
    bytes_[device] += size;
    return pointer;
  }

  void give(void* pointer) {
    auto entry = held_.find(reinterpret_cast<uintptr_t>(pointer));
    MUST(entry != held_.end());
    if (writes_) {
      MUST(*static_cast<char*>(pointer) == static_cast<char>(entry->second.tag));
      MUST(static_cast<char*>(pointer)[entry->second.size - 1] == static_cast<char>(entry->second.tag));
    }
    bytes_[entry->second.device] -= entry->second.size;
    held_.erase(entry);
    MUST(sn_placing_release(pointer) == 0);
    if (!draw(10)) {
      MUST(sn_placing_release(pointer) != 0);
      ++outcomes["freed twice"];
      ++bad_;
    }
  }

  void* any() {
    auto at = held_.begin();
    std::advance(at, draw(held_.size()));
    return reinterpret_cast<void*>(at->first);
  }

  // What nobody plans: other tensors come and go, wrong pointers are freed.
  void outside(size_t events) {
    while (events--) {
      if (held_.empty() || draw(2)) {
        take(size(), draw(devices_), stream());
      } else {
        void* pointer = any();
        if (!draw(4)) sn_placing_record_stream(pointer, stream());
        if (!draw(6)) {
          MUST(sn_placing_release(static_cast<char*>(pointer) + 256) == 1);
          ++bad_;
        }
        give(pointer);
      }
      if (!draw(6)) {
        MUST(sn_placing_release(&bad_) == 2);
        MUST(sn_placing_release(nullptr) == 2);
        ++outcomes["foreign"];
        bad_ += 2;
      }
    }
    check();
  }

  // First fit by size; at times offsets that overlap, or that must be refused.
  bool begin(int64_t pool, int64_t kind, void* stream) {
    int state = sn_placing_begin(pool, kind, stream);
    if (state == 2) {
      std::vector<int64_t> rows(3 * sn_placing_rows(pool, kind, nullptr, 0));
      const size_t count = rows.size() / 3;
      sn_placing_rows(pool, kind, rows.data(), count);
      std::vector<int64_t> offsets(count, -1);
      for (size_t i = 0; i < count; ++i) {
        if (rows[3 * i + 2] < 0) continue;
        int64_t offset = 0;
        for (bool moved = true; moved;) {
          moved = false;
          for (size_t j = 0; j < i; ++j) {
            bool meet = offsets[j] >= 0 && rows[3 * i + 1] < rows[3 * j + 2] && rows[3 * j + 1] < rows[3 * i + 2];
            if (meet && offset < offsets[j] + rows[3 * j] && offsets[j] < offset + rows[3 * i]) {
              offset = offsets[j] + rows[3 * j];
              moved = true;
            }
          }
        }
        offsets[i] = offset;
      }
      MUST(sn_placing_place(pool, kind, offsets.data(), count + 1) == -1);
      if (damages_ && !draw(4)) {
        for (int64_t& offset : offsets) offset = static_cast<int64_t>(draw(64)) * 512;
        ++outcomes["wrong places"];
      }
      if (count && rows[2] >= 0 && !draw(8)) {
        std::vector<int64_t> odd = offsets;
        odd[0] = 100;
        MUST(sn_placing_place(pool, kind, odd.data(), count) == -1);
      }
      MUST(sn_placing_place(pool, kind, offsets.data(), count) == 0);
      state = sn_placing_begin(pool, kind, stream);
      MUST(state != 2);
    }
    if (state < 0) {
      ++outcomes["no arena"];
      MUST(limit_);
    }
    return state >= 0;
  }

  void step(size_t which, size_t kind) {
    int64_t pool = pools_[which];
    damages_ = true;
    void* on = stream();
    if (!begin(pool, static_cast<int64_t>(kind), on)) return;
    int64_t before = sn_placing_enter(pool);
    std::vector<void*> mine;
    const bool diverges = !draw(3);
    for (const Event& event : scripts_[kind]) {
      if (diverges && !draw(8)) {
        if (draw(2)) take(size(), 0, on);
        continue;
      }
      if (event.size) {
        while (mine.size() < event.which) mine.push_back(nullptr);
        mine.push_back(take(event.size, draw(12) ? 0 : draw(devices_), draw(12) ? on : stream()));
      } else if (event.which < mine.size() && mine[event.which]) {
        void* pointer = std::exchange(mine[event.which], nullptr);
        if (held_.count(reinterpret_cast<uintptr_t>(pointer))) give(pointer);
      }
      if (!draw(10)) {
        sn_placing_enter(before);  // between two parts of a step
        outside(draw(3));
        sn_placing_enter(pool);
      }
    }
    sn_placing_enter(before);
    // Gradients outlive their step, others are let go with it.
    for (void* pointer : mine)
      if (pointer && draw(5) && held_.count(reinterpret_cast<uintptr_t>(pointer))) give(pointer);
    int64_t figures[4];
    sn_placing_step(pool, static_cast<int64_t>(kind), figures);
    outcomes["hits"] += figures[0];
    outcomes["misses"] += figures[1];
    check();
  }

  void check() {
    int64_t bad = 0;
    for (int device = 0; device < 2; ++device) {
      int64_t now[8];
      sn_placing_statistics(device, now);
      MUST(now[3] >= bytes_[device]);
      MUST(now[0] >= now[3] && now[1] >= now[0] && now[4] >= now[3] && now[2] <= now[0]);
      MUST(!limit_ || now[1] <= limit_);
      bad += now[7];
    }
    MUST(bad == bad_);
  }

  void end() {
    while (!held_.empty()) give(any());
    for (int64_t pool : pools_) sn_placing_forget(pool);
    sn_placing_trim();
    check();
    for (int device = 0; device < 2; ++device) {
      int64_t now[8];
      sn_placing_statistics(device, now);
      MUST(now[0] == 0 && now[2] == 0 && now[3] == 0);
    }
    sn_placing_close();
    ++outcomes["traces"];
  }

  std::mt19937_64 random_;
  std::map<uintptr_t, Held> held_;
  std::vector<int64_t> pools_;
  std::vector<std::vector<Event>> scripts_;
  int64_t bytes_[2] = {0, 0}, largest_ = 0, limit_ = 0, bad_ = 0;
  uint64_t devices_ = 1;
  bool writes_ = false, damages_ = false;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  uint64_t first = std::strtoull(arguments[1], nullptr, 10), traces = std::strtoull(arguments[2], nullptr, 10);
  for (seed_now = first; seed_now < first + traces; ++seed_now) {
    const bool repeats = seed_now % 5 == 0;
    Trace trace(seed_now, !repeats);
    if (!repeats)
      trace.run();
    else
      trace.repeat();
  }
  for (auto& [name, times] : outcomes) std::printf("%llu %s\n", (unsigned long long)times, name);
}
