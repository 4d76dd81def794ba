// Gives an allocation of a foreign shared object an address of the caller's choice: the object's calls of
// posix_memalign and free come here first.
#pragma once
#include "error.h"

namespace staccato::capture {

void install(const char* object);
void next(uint64_t least, uint64_t most, uint64_t granule, void* place);
uint64_t taken();  // ends capturing on this thread
void forget(void* place);

}  // namespace staccato::capture
