// What threads may do to each other, through the C face, for the sanitizers to watch: `test_memory host`, and with the
// fake driver `test_memory cuda` and `test_memory relayed`, where another device helps to load. What it promises in one thread is tested in tests/runtime/memory/test_memory.py.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "../staccato_memory.h"

namespace {

constexpr uint64_t PAGE = 64 << 10;
constexpr uint64_t POOL_PAGES = 64;
constexpr double LONG_S = 60;
constexpr uint64_t RELAY_BYTES = 3 * PAGE / 2;  // two pieces, which are no whole pages
uint32_t backend, helpers;

#define EXPECT(condition)                                                                        \
    do {                                                                                         \
        if (!(condition)) {                                                                      \
            std::fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #condition, stc_last_error()); \
            std::abort();                                                                        \
        }                                                                                        \
    } while (false)

struct Device {
    explicit Device(uint64_t pages = POOL_PAGES, uint64_t pinned_most = 0) {
        const stc_config config{backend, 0, PAGE, pages * PAGE, 0, 0, helpers, 0, RELAY_BYTES, pinned_most};
        EXPECT(stc_device_open(&config, &handle) == STC_OK);
    }
    ~Device() {
        EXPECT(stc_device_settle(handle, LONG_S) == STC_OK);
        const stc_stats now = stats();
        EXPECT(now.pages_free == now.pages_total && now.pages_promised == 0 && now.reserved_bytes == 0);
        EXPECT(stc_device_close(handle) == STC_OK);
    }
    stc_stats stats() const {
        stc_stats stats;
        EXPECT(stc_device_stats(handle, &stats) == STC_OK);
        return stats;
    }
    stc_device* handle;
};

struct Reservation {
    Reservation(const Device& device, uint64_t pages) {
        EXPECT(stc_reserve(device.handle, pages * PAGE, &handle, &place) == STC_OK);
        bytes = reinterpret_cast<unsigned char*>(place.address);
    }
    ~Reservation() {  // where many unmaps in a row were made to fail, the library goes on trying and so do we
        int attempts = 0;
        while (stc_release(handle, LONG_S) != STC_OK) {
            EXPECT(++attempts < 1000);
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
    }
    stc_reservation* handle;
    stc_place place;
    unsigned char* bytes;
};

struct Cache {
    Cache(const Device& device, uint64_t pages) : size(pages * PAGE) {
        void* base;
        int fd;
        uint64_t huge;
        EXPECT(stc_cache_open(-1, size, &handle, &base, &fd) == STC_OK);
        EXPECT(stc_cache_commit(handle, 0, size, &huge) == STC_OK);
        EXPECT(stc_cache_pin(handle, device.handle, 0, size) == STC_OK);
        bytes = static_cast<unsigned char*>(base);
        for (uint64_t i = 0; i < size; i++) bytes[i] = static_cast<unsigned char>(i * 31 + i / PAGE);
    }
    ~Cache() { EXPECT(stc_cache_close(handle) == STC_OK); }
    uint64_t size;
    stc_cache* handle;
    unsigned char* bytes;
};

void in_threads(int count, const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < count; i++) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
}

bool filled(const unsigned char* bytes, uint64_t count, unsigned char value) {
    return bytes[0] == value && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

void map_now_or_later(const Device& device, const Reservation& reservation, uint64_t offset, uint64_t size, bool later) {
    if (!later) {
        EXPECT(stc_map(reservation.handle, offset, size, LONG_S) == STC_OK);
        return;
    }
    stc_ticket ticket;
    int code;
    while ((code = stc_map_later(reservation.handle, offset, size, &ticket)) == STC_NO_PAGES) std::this_thread::yield();
    EXPECT(code == STC_OK);
    EXPECT(stc_map(reservation.handle, offset, size, LONG_S) == STC_STATE);
    EXPECT(stc_ticket_wait(device.handle, ticket, LONG_S) == STC_OK);
}

// A growth that fails or is cancelled leaves the range empty and the promise of pages taken back.
void a_failed_growth_leaves_the_range_empty() {
    Device device;
    Reservation reservation(device, 16);
    for (int round = 0; round < 20; round++) {
        stc_ticket ticket;
        if (round % 2) EXPECT(stc_device_fault(device.handle, STC_FAULT_MAP, 1) == STC_OK);
        EXPECT(stc_map_later(reservation.handle, 0, 4 * PAGE, &ticket) == STC_OK);
        if (round % 2 == 0) EXPECT(stc_ticket_cancel(device.handle, ticket) == STC_OK);
        const int code = stc_ticket_wait(device.handle, ticket, LONG_S);
        EXPECT(round % 2 ? code != STC_OK : code == STC_OK || code == STC_CANCELLED);
        if (code == STC_OK) EXPECT(stc_unmap(reservation.handle, 0, 4 * PAGE, 0) == STC_OK);
        EXPECT(stc_device_settle(device.handle, LONG_S) == STC_OK);
        stc_stats stats;
        EXPECT(stc_device_stats(device.handle, &stats) == STC_OK);
        EXPECT(stats.pages_free == stats.pages_total && stats.pages_promised == 0);
    }
}

void owners_never_see_each_others_pages() {
    Device device;
    in_threads(6, [&](int thread) {
        Reservation reservation(device, 32);
        for (int round = 0; round < 40; round++) {
            const uint64_t offset = static_cast<uint64_t>((round * 7 + thread) % 24) * PAGE;
            map_now_or_later(device, reservation, offset, 8 * PAGE, round % 2);
            for (uint64_t i = 0; i < 8 * PAGE; i += 512) {
                EXPECT(reservation.bytes[offset + i] == 0 || reservation.bytes[offset + i] == thread + 1);
            }
            std::memset(reservation.bytes + offset, thread + 1, 8 * PAGE);
            EXPECT(filled(reservation.bytes + offset, 8 * PAGE, static_cast<unsigned char>(thread + 1)));
            EXPECT(stc_unmap(reservation.handle, offset, 8 * PAGE, 0) == STC_OK);
        }
    });
}

// The copy out is slow, its pages are unmapped and the same addresses mapped and written while it is under way.
void a_late_unmap_leaves_the_newer_mapping_alone() {
    Device device;
    Cache cache(device, 16);
    Reservation reservation(device, 16);
    EXPECT(stc_device_throttle(device.handle, 256e6) == STC_OK);
    for (int round = 1; round <= 20; round++) {
        stc_ticket ticket;
        EXPECT(stc_map(reservation.handle, 0, 16 * PAGE, LONG_S) == STC_OK);
        std::memset(reservation.bytes, round, 16 * PAGE);
        EXPECT(stc_copy(reservation.handle, 0, cache.handle, 0, 16 * PAGE, STC_TO_HOST, 0, &ticket) == STC_OK);
        EXPECT(stc_unmap(reservation.handle, 0, 16 * PAGE, 0) == STC_OK);
        EXPECT(stc_map(reservation.handle, 0, 16 * PAGE, LONG_S) == STC_OK);
        std::memset(reservation.bytes, 200, 16 * PAGE);
        EXPECT(stc_ticket_wait(device.handle, ticket, LONG_S) == STC_OK);
        EXPECT(filled(cache.bytes, 16 * PAGE, static_cast<unsigned char>(round)));
        EXPECT(filled(reservation.bytes, 16 * PAGE, 200));
        EXPECT(stc_unmap(reservation.handle, 0, 16 * PAGE, 0) == STC_OK);
    }
}

void loads_and_cancels_of_many_threads_lose_no_page() {
    Device device;
    Cache cache(device, 16);
    std::atomic<int> loaded{0}, cancelled{0}, refused{0};
    in_threads(6, [&](int thread) {
        Reservation reservation(device, 16);
        std::minstd_rand random(static_cast<unsigned>(thread + 1));
        for (int round = 0; round < 40; round++) {
            const stc_segment segments[] = {{0, 0, 9 * PAGE}, {9 * PAGE + 100, 9 * PAGE + 100, 5 * PAGE}};
            stc_ticket ticket;
            const int code = stc_load(reservation.handle, cache.handle, segments, 2, 2 * PAGE, &ticket);
            if (code == STC_NO_PAGES) {
                refused++;
                continue;
            }
            EXPECT(code == STC_OK);
            if (random() % 4 == 0) {  // on a GPU the last chunks are still on their way when this is taken
                while (stc_unmap(reservation.handle, 0, 15 * PAGE, 0) == STC_STATE) std::this_thread::yield();
                continue;
            }
            if (random() % 3 == 0) EXPECT(stc_ticket_cancel(device.handle, ticket) == STC_OK);
            const int end = stc_ticket_wait(device.handle, ticket, LONG_S);
            EXPECT(end == STC_OK || end == STC_CANCELLED);
            (end ? cancelled : loaded)++;
            if (end) continue;
            EXPECT(std::memcmp(reservation.bytes, cache.bytes, 9 * PAGE) == 0);
            EXPECT(filled(reservation.bytes + 9 * PAGE, 100, 0));
            EXPECT(stc_unmap(reservation.handle, 0, 15 * PAGE, 0) == STC_OK);
        }
    });
    EXPECT(loaded > 0 && cancelled > 0);
    std::printf("  %d loaded, %d cancelled, %d refused\n", loaded.load(), cancelled.load(), refused.load());
}

void a_load_comes_over_all_links() {
    if (!helpers) return;
    const auto carried = reinterpret_cast<uint64_t (*)(int)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_carried"));
    EXPECT(carried);
    Device device;
    Cache cache(device, 48);
    Reservation reservation(device, 48);
    const uint64_t before[] = {carried(0), carried(1)};
    const stc_segment segments[] = {{0, 0, 40 * PAGE + 1000}, {41 * PAGE, 41 * PAGE, 7 * PAGE}};
    stc_ticket ticket;
    EXPECT(stc_load(reservation.handle, cache.handle, segments, 2, 5 * PAGE, &ticket) == STC_OK);
    EXPECT(stc_ticket_wait(device.handle, ticket, LONG_S) == STC_OK);
    for (const stc_segment& segment : segments) {
        EXPECT(std::memcmp(reservation.bytes + segment.offset, cache.bytes + segment.offset, segment.bytes) == 0);
    }
    EXPECT(filled(reservation.bytes + 40 * PAGE + 1000, PAGE - 1000, 0));
    const uint64_t own = carried(0) - before[0], other = carried(1) - before[1];
    EXPECT(own + other == 47 * PAGE + 1000 && own > 20 * PAGE && other > 20 * PAGE);
    EXPECT(stc_unmap(reservation.handle, 0, 48 * PAGE, 0) == STC_OK);
}

// Three owners move their blocks out and in by turns while a fourth loads and the injector fails this and that.
void blocks_survive_faults_and_company() {
    Device device;
    Cache image(device, 16);
    Cache parked(device, 3 * 16);
    std::atomic<bool> over{false};
    std::thread chaos([&] {
        std::minstd_rand random(7);
        while (!over) {
            EXPECT(stc_device_fault(device.handle, static_cast<int>(random() % 3), random() % 5) == STC_OK);
            std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        for (int operation = 0; operation < 3; operation++) {
            EXPECT(stc_device_fault(device.handle, operation, 0) == STC_OK);
        }
    });
    in_threads(4, [&](int thread) {
        Reservation reservation(device, 16);
        for (int round = 0; round < 60; round++) {
            stc_ticket ticket;
            if (thread == 3) {
                const stc_segment segment{0, 0, 12 * PAGE};
                if (stc_load(reservation.handle, image.handle, &segment, 1, PAGE, &ticket) != STC_OK) continue;
                if (stc_ticket_wait(device.handle, ticket, LONG_S) != STC_OK) continue;
                EXPECT(std::memcmp(reservation.bytes, image.bytes, 12 * PAGE) == 0);
                EXPECT(stc_unmap(reservation.handle, 0, 12 * PAGE, 0) == STC_OK);
                continue;
            }
            if (stc_map(reservation.handle, 0, 16 * PAGE, LONG_S) != STC_OK) continue;
            std::memset(reservation.bytes, thread + 1, 16 * PAGE);
            const uint64_t mine = static_cast<uint64_t>(thread) * 16 * PAGE;
            const stc_piece pieces[] = {{0, 2 * PAGE, mine, 2 * PAGE, PAGE},
                                        {PAGE, 2 * PAGE, mine + PAGE, 2 * PAGE, PAGE}};
            const uint32_t ids[] = {1, 2, 3, 6}, places[] = {0, 1, 2, 7};
            auto move = [&](int direction, stc_ticket after) {
                const int code = stc_copy_blocks(reservation.handle, parked.handle, pieces, 2, ids, places, 4,
                                                 direction, after, &ticket);
                EXPECT(code == STC_OK);
                return ticket;
            };
            const stc_ticket back = move(STC_TO_DEVICE, move(STC_TO_HOST, 0));
            const bool failed = stc_ticket_wait(device.handle, back, LONG_S) != STC_OK;
            EXPECT(failed || filled(reservation.bytes, 16 * PAGE, static_cast<unsigned char>(thread + 1)));
            EXPECT(stc_unmap(reservation.handle, 0, 16 * PAGE, 0) == STC_OK);
        }
    });
    over = true;
    chaos.join();
    EXPECT(stc_device_settle(device.handle, LONG_S) == STC_OK);
    std::printf("  %llu unmaps failed and were tried again\n",
                static_cast<unsigned long long>(device.stats().unmap_failures));
}

// More ranges than may be registered at a time, pinned and unpinned by their threads while copies of others go on.
void copies_meet_registered_memory_alone() {
    const auto calls = backend == STC_BACKEND_HOST
                           ? nullptr
                           : reinterpret_cast<uint64_t (*)(int, int)>(
                                 dlsym(dlopen("libcuda.so.1", RTLD_NOW), "fake_calls"));
    enum { REFUSED_COPIES = 6, LATE_COPIES = 7 };
    Device device(POOL_PAGES, 16 * PAGE);
    Cache whole(device, 8);
    void* base;
    int fd;
    uint64_t huge;
    stc_cache* cache;
    EXPECT(stc_cache_open(-1, 4 * 12 * PAGE, &cache, &base, &fd) == STC_OK);
    EXPECT(stc_cache_commit(cache, 0, 4 * 12 * PAGE, &huge) == STC_OK);
    in_threads(4, [&](int thread) {
        Reservation reservation(device, 12);
        const uint64_t mine = static_cast<uint64_t>(thread) * 12 * PAGE;
        auto* bytes = static_cast<unsigned char*>(base) + mine;
        EXPECT(stc_map(reservation.handle, 0, 12 * PAGE, LONG_S) == STC_OK);
        for (int round = 0; round < 20; round++) {
            stc_ticket out, in;
            std::memset(reservation.bytes, round + 1, 12 * PAGE);
            EXPECT(stc_cache_pin(cache, device.handle, mine, 12 * PAGE) == STC_OK);
            EXPECT(stc_copy(reservation.handle, 0, cache, mine + 100, 11 * PAGE, STC_TO_HOST, 0, &out) == STC_OK);
            EXPECT(stc_copy(reservation.handle, 0, cache, mine, 12 * PAGE, STC_TO_DEVICE, out, &in) == STC_OK);
            if (round % 2) EXPECT(stc_ticket_wait(device.handle, in, LONG_S) == STC_OK);
            EXPECT(device.stats().pinned_bytes <= 16 * PAGE);
            EXPECT(stc_ticket_wait(device.handle, in, LONG_S) == STC_OK);
            EXPECT(filled(bytes + 100, 11 * PAGE, static_cast<unsigned char>(round + 1)));
            EXPECT(stc_cache_unpin(cache, device.handle, mine) == STC_OK);
        }
        EXPECT(stc_unmap(reservation.handle, 0, 12 * PAGE, 0) == STC_OK);
    });
    EXPECT(stc_device_pinned(device.handle, LONG_S) == STC_OK);
    EXPECT(stc_cache_close(cache) == STC_OK);
    EXPECT(!calls || (calls(REFUSED_COPIES, 0) == 0 && calls(LATE_COPIES, 0) == 0));
}

// Each thread captures every other allocation that it makes in the object; all are freed there.
void captures_of_many_threads_are_not_mixed_up(const char* name) {
    void* object = dlopen(name, RTLD_LAZY);
    EXPECT(object);
    const auto allocate = reinterpret_cast<void* (*)(size_t, size_t)>(dlsym(object, "allocate"));
    const auto give_back = reinterpret_cast<void (*)(void*)>(dlsym(object, "give_back"));
    EXPECT(allocate && give_back && stc_capture_install(name) == STC_OK);
    in_threads(6, [&](int thread) {
        alignas(64) unsigned char places[4][256];
        const size_t bytes = static_cast<size_t>(100 + thread);
        for (int round = 0; round < 500; round++) {
            unsigned char* place = places[round % 4];
            uint64_t taken;
            EXPECT(stc_capture_next(bytes, bytes, 1, place) == STC_OK);
            void *other = allocate(64, 99), *captured = allocate(64, bytes), *late = allocate(64, bytes);
            EXPECT(stc_capture_taken(&taken) == STC_OK && taken == bytes);
            EXPECT(captured == place && other != place && late != place);
            std::memset(captured, thread, bytes);
            for (void* memory : {other, captured, late}) give_back(memory);
            EXPECT(filled(place, bytes, static_cast<unsigned char>(thread)));
            EXPECT(stc_capture_forget(place) == STC_OK);
        }
    });
}

void captures_of_an_object_that_binds_late() { captures_of_many_threads_are_not_mixed_up("liballocates_late.so"); }
void captures_of_an_object_that_is_sealed() { captures_of_many_threads_are_not_mixed_up("liballocates_sealed.so"); }

struct {
    const char* name;
    void (*run)();
} const TESTS[] = {
    {"owners never see each other's pages", owners_never_see_each_others_pages},
    {"a failed growth leaves the range empty", a_failed_growth_leaves_the_range_empty},
    {"a late unmap leaves the newer mapping alone", a_late_unmap_leaves_the_newer_mapping_alone},
    {"loads and cancels of many threads lose no page", loads_and_cancels_of_many_threads_lose_no_page},
    {"a load comes over all links", a_load_comes_over_all_links},
    {"blocks survive faults and company", blocks_survive_faults_and_company},
    {"copies meet registered memory alone", copies_meet_registered_memory_alone},
    {"captures of an object that binds late", captures_of_an_object_that_binds_late},
    {"captures of an object that is sealed", captures_of_an_object_that_is_sealed},
};

}  // namespace

int main(int count, char** arguments) {
    const char* name = count > 1 ? arguments[1] : "host";
    backend = std::strcmp(name, "host") == 0 ? STC_BACKEND_HOST : STC_BACKEND_CUDA;
    helpers = std::strcmp(name, "relayed") == 0 ? 1u << 1 : 0;
    for (const auto& test : TESTS) {
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.run();
    }
}
