#include "capture.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace staccato::capture {

namespace {

// Conditions for the thread's next allocation to get `place`.
struct Wanted {
    void* place = nullptr;
    uint64_t least, most, granule;
    uint64_t taken;

    bool is(size_t alignment, size_t bytes) const {
        const bool fits = bytes == least || (bytes > least && bytes <= most && bytes % granule == 0);
        return place && taken == 0 && fits && reinterpret_cast<uintptr_t>(place) % alignment == 0;
    }
};
thread_local Wanted wanted;

// -- places that may have been handed out -----------------------------------------------------------------------------

std::mutex mu;
std::set<uintptr_t>& places = *new std::set<uintptr_t>;  // never destroyed: objects free until the very end
// Bounds of all places: the bounds decide nearly every free, without the lock.
std::atomic<uintptr_t> lowest{UINTPTR_MAX}, highest{0};

void update_bounds() {
    lowest = places.empty() ? UINTPTR_MAX : *places.begin();
    highest = places.empty() ? 0 : *places.rbegin();
}

bool is_place(uintptr_t address) {
    if (address < lowest.load(std::memory_order_relaxed) || address > highest.load(std::memory_order_relaxed)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(mu);
    return places.count(address) > 0;
}

// -- what the object calls --------------------------------------------------------------------------------------------

int allocate(void** out, size_t alignment, size_t bytes) {
    if (!wanted.is(alignment, bytes)) return posix_memalign(out, alignment, bytes);
    wanted.taken = bytes;
    *out = wanted.place;
    return 0;
}

void release(void* pointer) {
    if (!is_place(reinterpret_cast<uintptr_t>(pointer))) free(pointer);
}

}  // namespace

void next(uint64_t least, uint64_t most, uint64_t granule, void* place) {
    if (least == 0 || least > most || granule == 0) {
        fail(STC_INVALID, "no allocation has ", least, " bytes, or up to ", most, " in granules of ", granule);
    }
    if (wanted.place) fail(STC_STATE, "this thread captures already: ask what was taken first");
    std::lock_guard<std::mutex> lock(mu);
    if (!places.insert(reinterpret_cast<uintptr_t>(place)).second) {
        fail(STC_STATE, "the place at ", place, " was handed out before: forget it first");
    }
    update_bounds();
    wanted = {place, least, most, granule, 0};
}

uint64_t taken() {
    const Wanted was = std::exchange(wanted, {});
    if (was.place && was.taken == 0) forget(was.place);
    return was.place ? was.taken : 0;
}

void forget(void* place) {
    std::lock_guard<std::mutex> lock(mu);
    places.erase(reinterpret_cast<uintptr_t>(place));
    update_bounds();
}

// -- the object's table of addresses ----------------------------------------------------------------------------------

#if defined(__x86_64__) && defined(__GLIBC__)

namespace {

constexpr uintptr_t PAGE_BYTES = 4096;

struct Range {
    uintptr_t begin = 0, end = 0;
};

// Finds a loaded object; from now on the object stays loaded for good.
const link_map& find(const char* path) {
    void* handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    if (!handle) fail(STC_STATE, path, " is not loaded: import it first");
    link_map* object = nullptr;
    const bool found = dlinfo(handle, RTLD_DI_LINKMAP, &object) == 0;
    dlclose(handle);
    if (!found) fail(STC_DRIVER, path, " is loaded, but the loader does not say where");
    return *object;
}

uintptr_t dynamic(const link_map& object, ElfW(Sxword) tag) {
    const ElfW(Dyn)* entry = object.l_ld;
    while (entry->d_tag != tag && entry->d_tag != DT_NULL) entry++;
    return entry->d_un.d_ptr;
}

// Places where the object keeps the address of an imported function.
std::vector<void**> entries_of(const link_map& object, const char* function) {
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(dynamic(object, DT_SYMTAB));
    const auto* names = reinterpret_cast<const char*>(dynamic(object, DT_STRTAB));
    constexpr ElfW(Sxword) TABLES[][2] = {{DT_JMPREL, DT_PLTRELSZ}, {DT_RELA, DT_RELASZ}};
    std::vector<void**> entries;
    for (auto [table, bytes] : TABLES) {
        const auto* relocation = reinterpret_cast<const ElfW(Rela)*>(dynamic(object, table));
        const auto* end = relocation + dynamic(object, bytes) / sizeof *relocation;
        for (; relocation < end; relocation++) {
            const auto type = ELF64_R_TYPE(relocation->r_info);
            if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
            const char* name = names + symbols[ELF64_R_SYM(relocation->r_info)].st_name;
            if (std::strcmp(name, function) != 0) continue;
            entries.push_back(reinterpret_cast<void**>(object.l_addr + relocation->r_offset));
        }
    }
    if (entries.empty()) fail(STC_UNSUPPORTED, object.l_name, " does not import ", function, ": nothing to capture");
    return entries;
}

// The pages that the loader made read-only when the object was loaded.
Range sealed_pages(const link_map& object) {
    struct Search {
        uintptr_t base;
        Range found;
    } search{object.l_addr, {}};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* argument) {
            auto& [base, found] = *static_cast<Search*>(argument);
            if (info->dlpi_addr != base) return 0;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto& segment = info->dlpi_phdr[i];
                const uintptr_t begin = base + segment.p_vaddr, end = begin + segment.p_memsz;
                if (segment.p_type == PT_GNU_RELRO) found = {begin & -PAGE_BYTES, end & -PAGE_BYTES};
            }
            return 1;
        },
        &search);
    return search.found;
}

void protect(uintptr_t page, int protection) {
    if (mprotect(reinterpret_cast<void*>(page), PAGE_BYTES, protection) != 0) {
        fail(STC_DRIVER, "the protection of an object's addresses can't be changed: ", std::strerror(errno));
    }
}

template <typename Function>
void redirect(const std::vector<void**>& entries, Range sealed, Function* function) {
    for (void** entry : entries) {
        const auto page = reinterpret_cast<uintptr_t>(entry) & -PAGE_BYTES;
        const bool read_only = page >= sealed.begin && page < sealed.end;
        if (read_only) protect(page, PROT_READ | PROT_WRITE);
        __atomic_store_n(entry, reinterpret_cast<void*>(function), __ATOMIC_RELEASE);
        if (read_only) protect(page, PROT_READ);
    }
}

}  // namespace

void install(const char* path) {
    const link_map& object = find(path);
    const auto allocating = entries_of(object, "posix_memalign"), freeing = entries_of(object, "free");
    const Range sealed = sealed_pages(object);
    redirect(freeing, sealed, release);  // first: an object given a place can free the place
    redirect(allocating, sealed, allocate);
}

#else

void install(const char* path) {
    fail(STC_UNSUPPORTED, "allocations of ", path, " can be captured on Linux, x86-64 and glibc only");
}

#endif

}  // namespace staccato::capture
