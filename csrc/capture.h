// One allocation of somebody else's shared object at an address of our choice: posix_memalign and free of that object
// come here first.
#pragma once
#include "error.h"

namespace staccato::capture {

void install(const char* object);
void next(uint64_t least, uint64_t most, uint64_t granule, void* place);
uint64_t taken();  // and captures nothing more on this thread
void forget(void* place);

}  // namespace staccato::capture
