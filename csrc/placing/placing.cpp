// An allocator that gives the tensors of a recorded step the addresses a packer chose, for torch's
// CUDAPluggableAllocator: sn_memory._placing, plain C functions that ctypes and torch call.
//
// A pool belongs to one planned model. The first step of a kind is recorded: sizes in order, and when each
// block is freed. Its rows are packed (sn_memory/pool), and from the next step on the n-th allocation lies in
// the pool's arena where the packing says, if its size is as recorded and nothing lies there. All else comes
// from size classes. So what a recording says only decides how much is reserved, never whether two blocks
// overlap.
//
// Streams: a freed block of a class is used again by the stream it was allocated on, an arena by the stream
// its steps run on; who used a block elsewhere (record_stream) has the device waited for when it is freed.
#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sources.h"

#define SN_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Address = uintptr_t;

constexpr size_t kGrain = 512;           // of addresses and sizes, as torch's own allocator has it
constexpr size_t kGranule = 2ull << 20;  // what the driver maps at once
constexpr size_t kSmall = 1ull << 20;    // up to here a new segment is one granule
constexpr size_t kShared = 16ull << 20;  // up to here blocks share segments; above, each has its own
constexpr size_t kTogether = 8;          // blocks of a class for which a segment is made at most
constexpr size_t kDivisions = 16;        // classes for each power of two: at most a sixteenth is lost
constexpr size_t kLargest = 1ull << 60;
// How many rows a step may skip to meet its recording again, and how often a step is recorded in all: the
// first one allocates what libraries keep, which later ones do not.
constexpr size_t kAhead = 16;
constexpr int kRecordings = 3;

size_t up(size_t size, size_t step) { return (size + step - 1) / step * step; }

size_t class_of(size_t size) {
  size_t power = kGrain;
  while (power * 2 <= size) power *= 2;
  size = up(size, std::max(power / kDivisions, kGrain));
  return size > kShared ? up(size, kGranule) : size;
}

// The segment for a class: as few blocks as fill granules without a rest, where some do.
size_t segment_of_class(size_t size) {
  if (size <= kSmall) return kGranule;
  for (size_t count = 1; size <= kShared && count <= kTogether; ++count)
    if (count * size % kGranule == 0) return count * size;
  return up(size, kGranule);
}

struct Segment {
  Address base;
  size_t size;
  int device;
  size_t used = 0;   // up to where blocks were cut
  size_t live = 0;   // blocks in use
  bool arena = false, retired = false;
  bool own = false;  // of one block of a recorded step, and given back with it
  std::map<size_t, size_t> taken;  // of an arena: size by offset
};

struct Block {
  Segment* segment;
  size_t size;
  void* stream;
  bool free = false, crossed = false;
  int64_t pool = 0, recording = 0;  // which recording has its row, 0 for none
  size_t row = 0;
};

struct Row {
  size_t size;
  int64_t lower, upper;  // upper is -1 where it was alive when the next step began
};

struct Place {
  size_t size;
  int64_t offset;  // -1: outlives its step, and lies in a class
};

struct Step {
  std::vector<Row> rows;
  std::vector<Place> places;
  size_t height = 0;
  bool placed = false;
  int recordings = 0;
  // Of the step that ran last: kept ones lie in classes as they should, skipped rows were not asked for.
  int64_t hits = 0, misses = 0, kept = 0, skipped = 0;
};

struct Pool {
  int device = 0;
  void* stream = nullptr;
  Segment* arena = nullptr;
  std::map<int64_t, Step> steps;
  Step* step = nullptr;
  int64_t recording = 0, clock = 0;  // recording: its number, 0 where the step is placed
  size_t next = 0;
};

// As sn_memory/pool/placing.py names them.
struct Statistics {
  int64_t reserved = 0, peak_reserved = 0, arenas = 0, allocated = 0, peak_allocated = 0;
  int64_t hits = 0, misses = 0, bad_frees = 0;
};
constexpr int kFigures = 8;

enum Freed { kFreed = 0, kTwice = 1, kForeign = 2 };

class Allocator {
 public:
  std::mutex mutex;
  std::string error;

  const char* open(const char* name, int64_t limit_bytes) {
    if (source_.take) return "it is open already";
    if (!std::strcmp(name, "host"))
      source_ = {sn::host_take, sn::host_give, sn::host_wait};
    else if (sn::load_runtime(name))
      source_ = {sn::cuda_take, sn::cuda_give, sn::cuda_wait};
    else
      return "the library or one of its functions was not found";
    limit_ = limit_bytes > 0 ? limit_bytes : INT64_MAX;
    return nullptr;
  }

  void close() {
    for (auto& [base, segment] : segments_)
      source_.give(segment.device, reinterpret_cast<void*>(base), segment.size);
    segments_.clear();
    blocks_.clear();
    free_.clear();
    shared_.clear();
    pools_.clear();
    statistics_.clear();
    source_ = {};
  }

  void* allocate(size_t size, int device, void* stream, int64_t entered) {
    if (!size) return nullptr;
    if (!source_.take || size > kLargest) {
      error = source_.take ? "no memory has " + std::to_string(size) + " bytes" : "it is not open";
      return nullptr;
    }
    size = up(size, kGrain);
    Pool* pool = pool_of(entered);
    if (pool && (pool->device != device || pool->stream != stream || !pool->step)) pool = nullptr;
    Address at = pool && !pool->recording ? placed(pool, size, stream) : 0;
    // A recorded step keeps large blocks back no longer than they live, or it would reserve twice its peak.
    if (!at && pool && pool->recording && size > kSmall) at = alone(size, device, stream);
    if (!at) at = classed(size, device, stream);
    if (!at) {
      error = "out of memory: " + std::to_string(size) + " bytes do not fit on device " +
              std::to_string(device) + ", where " + std::to_string(statistics_[device].reserved) +
              " are reserved, " + std::to_string(statistics_[device].allocated) + " of them in use";
      return nullptr;
    }
    Block& block = blocks_.at(at);
    ++block.segment->live;
    Statistics& now = statistics_[device];
    now.allocated += static_cast<int64_t>(block.size);
    now.peak_allocated = std::max(now.peak_allocated, now.allocated);
    if (pool && pool->recording) {
      block.pool = entered;
      block.recording = pool->recording;
      block.row = pool->step->rows.size();
      pool->step->rows.push_back({size, pool->clock++, -1});
    }
    return reinterpret_cast<void*>(at);
  }

  Freed release(void* pointer) {
    auto at = reinterpret_cast<Address>(pointer);
    auto entry = blocks_.find(at);
    if (entry == blocks_.end() || entry->second.free) {
      Segment* inside = segment_of(at);
      ++statistics_[inside ? inside->device : 0].bad_frees;
      return inside ? kTwice : kForeign;
    }
    Block& block = entry->second;
    Segment* segment = block.segment;
    int device = segment->device;
    if (block.crossed) source_.wait(device);
    note_freed(block);
    statistics_[device].allocated -= static_cast<int64_t>(block.size);
    --segment->live;
    if (segment->arena) {
      segment->taken.erase(at - segment->base);
      blocks_.erase(entry);
      if (segment->retired && !segment->live) give(segment);
    } else if (segment->own) {
      blocks_.erase(entry);
      give(segment);
    } else {
      block.free = true;
      block.crossed = false;
      block.recording = 0;
      free_[{device, block.stream, block.size}].push_back(at);
    }
    return kFreed;
  }

  void cross(void* pointer, void* stream) {
    auto entry = blocks_.find(reinterpret_cast<Address>(pointer));
    if (entry != blocks_.end() && entry->second.stream != stream) entry->second.crossed = true;
  }

  // Give back the segments of classes that nothing lies in.
  void trim() {
    for (auto list = free_.begin(); list != free_.end();) {
      auto& row = list->second;
      row.erase(std::remove_if(row.begin(), row.end(),
                               [this](Address at) {
                                 bool idle = !blocks_.at(at).segment->live;
                                 if (idle) blocks_.erase(at);
                                 return idle;
                               }),
                row.end());
      list = row.empty() ? free_.erase(list) : std::next(list);
    }
    for (auto next = segments_.begin(); next != segments_.end();) {
      Segment* segment = &(next++)->second;
      if (!segment->arena && !segment->live) give(segment);
    }
  }

  int64_t new_pool(int device) {
    pools_[++last_pool_].device = device;
    return last_pool_;
  }

  void forget(int64_t id) {
    give_back(id);
    pools_.erase(id);
  }

  void give_back(int64_t id) {
    if (Pool* pool = pool_of(id)) retire(pool);
  }

  // Begin a step: 0 it is placed, 1 it is recorded, 2 its recording is to be placed before, -1 no memory.
  int begin(int64_t id, int64_t key, void* stream) {
    if (!pool_of(id)) return -1;
    Pool& pool = *pool_of(id);
    if (pool.step)
      for (; pool.next < pool.step->places.size(); ++pool.next) skip(&pool);
    pool.step = nullptr;
    pool.recording = 0;  // what is alive now outlives its step
    Step& step = pool.steps[key];
    if (!step.placed && step.recordings && !step.rows.empty()) return 2;
    if (pool.stream != stream) {
      if (pool.arena) source_.wait(pool.device);
      pool.stream = stream;
    }
    bool differs = step.misses || step.skipped;
    if (!step.placed || (differs && step.recordings < kRecordings)) {
      retire(&pool);
      trim();
      step = Step{{}, {}, 0, false, step.recordings + 1};
      pool.recording = ++last_recording_;
      pool.clock = 0;
    } else if (step.height && (!pool.arena || pool.arena->size < step.height)) {
      if (!reserve_arena(&pool)) return -1;
    }
    step.hits = step.misses = step.kept = step.skipped = 0;
    pool.step = &step;
    pool.next = 0;
    return pool.recording ? 1 : 0;
  }

  Step* step_of(int64_t id, int64_t key) {
    Pool* pool = pool_of(id);
    if (!pool) return nullptr;
    auto step = pool->steps.find(key);
    return step == pool->steps.end() ? nullptr : &step->second;
  }

  bool place(int64_t id, int64_t key, const int64_t* offsets, int64_t count) {
    Step* step = step_of(id, key);
    if (!step || step->placed || count != static_cast<int64_t>(step->rows.size())) return false;
    std::vector<Place> places;
    size_t height = 0;
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = step->rows[i];
      int64_t offset = row.upper < 0 ? -1 : offsets[i];
      if (offset >= 0) {
        if (offset % kGrain || static_cast<size_t>(offset) > kLargest) return false;
        height = std::max(height, static_cast<size_t>(offset) + row.size);
      }
      places.push_back({row.size, offset});
    }
    step->places = std::move(places);
    step->rows.clear();
    step->height = height;
    step->placed = true;
    trim();
    return true;
  }

  void statistics(int device, int64_t* out) {
    const Statistics& now = statistics_[device];
    const int64_t figures[kFigures] = {now.reserved,       now.peak_reserved, now.arenas, now.allocated,
                                       now.peak_allocated, now.hits,          now.misses, now.bad_frees};
    std::copy(figures, figures + kFigures, out);
  }

  void reset_peaks(int device) {
    Statistics& now = statistics_[device];
    now.peak_reserved = now.reserved;
    now.peak_allocated = now.allocated;
  }

 private:
  using Class = std::tuple<int, void*, size_t>;

  Pool* pool_of(int64_t id) {
    auto entry = pools_.find(id);
    return entry == pools_.end() ? nullptr : &entry->second;
  }

  Segment* segment_of(Address at) {
    auto after = segments_.upper_bound(at);
    if (after == segments_.begin()) return nullptr;
    Segment& segment = std::prev(after)->second;
    return at < segment.base + segment.size ? &segment : nullptr;
  }

  Segment* take(int device, size_t size) {
    Statistics& now = statistics_[device];
    if (static_cast<int64_t>(size) > limit_ - now.reserved) return nullptr;
    void* base = source_.take(device, size);
    if (!base) return nullptr;
    auto at = reinterpret_cast<Address>(base);
    Segment& segment = segments_[at];
    segment.base = at;
    segment.size = size;
    segment.device = device;
    now.reserved += static_cast<int64_t>(size);
    now.peak_reserved = std::max(now.peak_reserved, now.reserved);
    return &segment;
  }

  Segment* take_or_trim(int device, size_t size) {
    Segment* segment = take(device, size);
    if (segment) return segment;
    trim();
    return take(device, size);
  }

  void give(Segment* segment) {
    Statistics& now = statistics_[segment->device];
    now.reserved -= static_cast<int64_t>(segment->size);
    if (segment->arena) now.arenas -= static_cast<int64_t>(segment->size);
    auto& shared = shared_[segment->device];
    shared.erase(std::remove(shared.begin(), shared.end(), segment), shared.end());
    source_.give(segment->device, reinterpret_cast<void*>(segment->base), segment->size);
    segments_.erase(segment->base);
  }

  void retire(Pool* pool) {
    Segment* arena = std::exchange(pool->arena, nullptr);
    if (!arena) return;
    arena->retired = true;
    if (!arena->live) give(arena);
  }

  bool reserve_arena(Pool* pool) {
    retire(pool);
    size_t height = 0;
    for (auto& [key, step] : pool->steps) height = std::max(height, step.height);
    pool->arena = take_or_trim(pool->device, up(height, kGranule));
    if (!pool->arena) {
      error = "out of memory: an arena of " + std::to_string(height) + " bytes does not fit on device " +
              std::to_string(pool->device) + ", where " +
              std::to_string(statistics_[pool->device].reserved) + " are reserved";
      return false;
    }
    pool->arena->arena = true;
    statistics_[pool->device].arenas += static_cast<int64_t>(pool->arena->size);
    return true;
  }

  void note_freed(const Block& block) {
    if (!block.recording) return;
    Pool* pool = pool_of(block.pool);
    if (pool && pool->recording == block.recording) pool->step->rows[block.row].upper = pool->clock++;
  }

  static void skip(Pool* pool) { pool->step->skipped += pool->step->places[pool->next].offset >= 0; }

  Address placed(Pool* pool, size_t size, void* stream) {
    Step& step = *pool->step;
    size_t end = std::min(step.places.size(), pool->next + kAhead);
    for (size_t at = pool->next; at < end; ++at) {
      if (step.places[at].size != size) continue;
      for (; pool->next < at; ++pool->next) skip(pool);
      ++pool->next;
      if (step.places[at].offset < 0) {
        ++step.kept;
        return 0;
      }
      auto offset = static_cast<size_t>(step.places[at].offset);
      if (!is_free(pool->arena, offset, size)) break;
      ++step.hits;
      ++statistics_[pool->device].hits;
      pool->arena->taken[offset] = size;
      Block block{pool->arena, size, stream};
      return blocks_.insert_or_assign(pool->arena->base + offset, block).first->first;
    }
    ++step.misses;
    ++statistics_[pool->device].misses;
    return 0;
  }

  static bool is_free(const Segment* arena, size_t offset, size_t size) {
    if (!arena || offset + size > arena->size) return false;
    auto after = arena->taken.lower_bound(offset);
    if (after != arena->taken.end() && after->first < offset + size) return false;
    if (after == arena->taken.begin()) return true;
    --after;
    return after->first + after->second <= offset;
  }

  Address alone(size_t size, int device, void* stream) {
    Segment* segment = take_or_trim(device, up(size, kGranule));
    if (!segment) return 0;
    segment->used = segment->size;
    segment->own = true;
    blocks_[segment->base] = Block{segment, size, stream};
    return segment->base;
  }

  Address classed(size_t size, int device, void* stream) {
    size = class_of(size);
    auto list = free_.find({device, stream, size});
    if (list != free_.end() && !list->second.empty()) {
      Address at = list->second.back();
      list->second.pop_back();
      blocks_.at(at).free = false;
      return at;
    }
    Segment* segment = with_room(size, device);
    if (!segment) return 0;
    Address at = segment->base + segment->used;
    segment->used += size;
    blocks_[at] = Block{segment, size, stream};
    return at;
  }

  Segment* with_room(size_t size, int device) {
    if (size > kShared) return take_or_trim(device, size);
    for (Segment* segment : shared_[device])
      if (segment->size - segment->used >= size) return segment;
    Segment* segment = take_or_trim(device, segment_of_class(size));
    if (segment) shared_[device].push_back(segment);
    return segment;
  }

  sn::Source source_;
  int64_t limit_ = INT64_MAX;
  std::map<Address, Segment> segments_;
  std::unordered_map<Address, Block> blocks_;
  std::map<Class, std::vector<Address>> free_;
  std::map<int, std::vector<Segment*>> shared_;  // by device, the oldest first
  std::map<int64_t, Pool> pools_;
  std::map<int, Statistics> statistics_;
  int64_t last_pool_ = 0, last_recording_ = 0;
};

// Never destroyed: torch frees tensors while the process ends.
Allocator& allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

// Whoever runs a part of a step enters its pool in the thread that runs it.
thread_local int64_t entered_pool = 0;

// The allocator, locked until the end of the expression or block.
class Locked {
 public:
  Allocator* operator->() const { return &allocator(); }

 private:
  std::lock_guard<std::mutex> lock_{allocator().mutex};
};

}  // namespace

// Opens the source of memory, "host" or the name of CUDA's runtime library; null, or why it did not open.
SN_EXPORT const char* sn_placing_open(const char* source, int64_t limit_bytes) {
  return Locked()->open(source, limit_bytes);
}

SN_EXPORT void sn_placing_close() { Locked()->close(); }

SN_EXPORT void* sn_placing_allocate(int64_t size, int device, void* stream) {
  return size < 0 ? nullptr : Locked()->allocate(static_cast<size_t>(size), device, stream, entered_pool);
}

SN_EXPORT int sn_placing_release(void* pointer) { return Locked()->release(pointer); }

// What torch calls. A null pointer would become a tensor there, so it throws.
SN_EXPORT void* sn_placing_malloc(ssize_t size, int device, void* stream) {
  Locked locked;
  void* pointer = size < 0 ? nullptr : locked->allocate(static_cast<size_t>(size), device, stream, entered_pool);
  if (!pointer && size) throw std::runtime_error("sn_memory's placing allocator: " + locked->error);
  return pointer;
}

SN_EXPORT void sn_placing_free(void* pointer, ssize_t, int, void*) {
  if (!pointer) return;
  Locked locked;
  if (int bad = locked->release(pointer))
    std::fprintf(stderr, "sn_memory's placing allocator: %p was freed, %s\n", pointer,
                 bad == kTwice ? "where no block in use begins: freed twice?" : "which it did not allocate");
}

SN_EXPORT void sn_placing_record_stream(void* pointer, void* stream) { Locked()->cross(pointer, stream); }

SN_EXPORT void sn_placing_trim() { Locked()->trim(); }

// torch asks for a private pool: a CUDA graph is captured, or a MemPool entered. Blocks freed meanwhile would
// be used by others while the graph is replayed.
SN_EXPORT void sn_placing_refuse_pool(int, std::pair<unsigned long long, unsigned long long>,
                                      std::function<bool(void*)>) {
  throw std::runtime_error(
      "sn_memory's placing allocator has no private pools, so CUDA graphs and torch.cuda.MemPool do not work "
      "with it. Run without use_placing_allocator(), or without graphs.");
}

SN_EXPORT const char* sn_placing_error() { return Locked()->error.c_str(); }

SN_EXPORT int64_t sn_placing_new_pool(int device) { return Locked()->new_pool(device); }

SN_EXPORT void sn_placing_forget(int64_t pool) { Locked()->forget(pool); }

SN_EXPORT void sn_placing_give_back(int64_t pool) { Locked()->give_back(pool); }

SN_EXPORT int sn_placing_begin(int64_t pool, int64_t key, void* stream) { return Locked()->begin(pool, key, stream); }

// Enter a pool in this thread, 0 for none; returns the one it was in.
SN_EXPORT int64_t sn_placing_enter(int64_t pool) { return std::exchange(entered_pool, pool); }

// Rows of a recording as (size, lower, upper); returns how many there are.
SN_EXPORT int64_t sn_placing_rows(int64_t pool, int64_t key, int64_t* out, int64_t room) {
  Locked locked;
  Step* step = locked->step_of(pool, key);
  if (!step) return 0;
  for (int64_t i = 0; i < std::min<int64_t>(room, static_cast<int64_t>(step->rows.size())); ++i) {
    *out++ = static_cast<int64_t>(step->rows[i].size);
    *out++ = step->rows[i].lower;
    *out++ = step->rows[i].upper;
  }
  return static_cast<int64_t>(step->rows.size());
}

// Place a recording; an offset below 0 leaves a row to the classes.
SN_EXPORT int sn_placing_place(int64_t pool, int64_t key, const int64_t* offsets, int64_t count) {
  return Locked()->place(pool, key, offsets, count) ? 0 : -1;
}

// Hits, misses, kept and skipped of the step of this key that ran last.
SN_EXPORT void sn_placing_step(int64_t pool, int64_t key, int64_t* out) {
  Locked locked;
  Step* step = locked->step_of(pool, key);
  const Step none, &last = step ? *step : none;
  const int64_t figures[4] = {last.hits, last.misses, last.kept, last.skipped};
  std::copy(figures, figures + 4, out);
}

SN_EXPORT void sn_placing_statistics(int device, int64_t* out) { Locked()->statistics(device, out); }

SN_EXPORT void sn_placing_reset_peaks(int device) { Locked()->reset_peaks(device); }
