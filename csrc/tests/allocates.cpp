// A shared object of others, as far as captures go: it allocates with posix_memalign and gives back with free.
#include <cstdlib>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void* allocate(size_t alignment, size_t bytes) {
    void* memory = nullptr;
    return posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

EXPORT void give_back(void* memory) { std::free(memory); }
