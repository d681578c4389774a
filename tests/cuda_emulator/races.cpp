// Races: two tasks touch the same bytes, one of them writes, and nothing orders them.
//
// Each stream counts its tasks. What a task knows to be over is its stream's clocks, joined
// with those of the events it has waited for and of the program when it was issued. For
// every eight bytes the last writer and the last reader of each stream are kept. An access
// is a race if the other one is not known to be over.
#include "core.h"
#include <map>
#include <set>
#include <sys/mman.h>

namespace emu {

struct Access { uint32_t step = 0; int place = 0; };
struct Cell {
    Access write;
    uint8_t writer = 0;
    uint32_t reads[SLOTS] = {};  // steps
};
constexpr size_t GRAIN = 8;

static Cell* cells_of_region() {
    size_t bytes = REGION_BYTES / GRAIN * sizeof(Cell);
    void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) die("no addresses for EMU_RACES");
    return (Cell*)address;
}
static Cell* const cells = watching ? cells_of_region() : nullptr;

static Stream* running = nullptr;
static int running_place = 0;
static std::map<std::pair<int, uint32_t>, int> places;  // of steps, by slot
static std::set<std::string> reported;

void begin_task(Stream* stream, const Task& task) {
    if (!watching) return;
    if (task.issued) join(stream->clocks, *task.issued);
    stream->clocks[stream->slot]++;
    running = stream;
    running_place = task.place;
    places[{stream->slot, stream->clocks[stream->slot]}] = task.place;
}

static void report(const char* what, const void* pointer, int slot, uint32_t step) {
    counters[RACE]++;
    char line[200];
    snprintf(line, sizeof line, "%s stream %d place %d, stream %d place %d", what, running->slot,
             running_place, slot, places[{slot, step}]);
    if (reported.insert(line).second) fprintf(stderr, "emulator: race at %p: %s\n", pointer, line);
}

static bool in_region(const void* pointer) {
    return (const char*)pointer >= region && (const char*)pointer < region + REGION_BYTES;
}

static void touch(const void* pointer, size_t bytes, bool writes) {
    if (!watching || !bytes || !running || !in_region(pointer)) return;
    size_t first = ((const char*)pointer - region) / GRAIN, last = ((const char*)pointer + bytes - 1 - region) / GRAIN;
    const Clocks& known = running->clocks;
    int slot = running->slot;
    for (size_t i = first; i <= last; i++) {
        Cell& cell = cells[i];
        if (cell.write.step > known[cell.writer]) {
            report(writes ? "two writes" : "a read beside a write", region + i * GRAIN, cell.writer, cell.write.step);
            cell.write.step = 0;
        }
        if (!writes) { cell.reads[slot] = known[slot]; continue; }
        for (int other = 1; other < SLOTS; other++) {
            if (cell.reads[other] > known[other]) report("a write beside a read", region + i * GRAIN, other, cell.reads[other]);
            cell.reads[other] = 0;
        }
        cell.write = {known[slot], running_place};
        cell.writer = slot;
    }
}

void read(const void* pointer, size_t bytes) { touch(pointer, bytes, false); }
void write(const void* pointer, size_t bytes) { touch(pointer, bytes, true); }

void forget(const Block& block) {
    if (!watching) return;
    size_t first = (block.address - region) / GRAIN, last = (block.address + block.bytes - 1 - region) / GRAIN;
    memset((void*)(cells + first), 0, (last - first + 1) * sizeof(Cell));
}

}  // namespace emu

// What g++ -fsanitize=thread calls before each access of a kernel.
extern "C" {
#define EMU_ACCESS(n) \
    void __tsan_read##n(void* p) { emu::read(p, n); } \
    void __tsan_write##n(void* p) { emu::write(p, n); } \
    void __tsan_unaligned_read##n(void* p) { emu::read(p, n); } \
    void __tsan_unaligned_write##n(void* p) { emu::write(p, n); }
EMU_ACCESS(1) EMU_ACCESS(2) EMU_ACCESS(4) EMU_ACCESS(8) EMU_ACCESS(16)
void __tsan_read_range(void* p, unsigned long n) { emu::read(p, n); }
void __tsan_write_range(void* p, unsigned long n) { emu::write(p, n); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
