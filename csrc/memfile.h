// Memory of the machine behind a file descriptor, in 2 MiB folios if the kernel gives folios.
#pragma once
#include "error.h"

namespace staccato {

constexpr uint64_t HUGE_BYTES = 2 << 20;

int make_memfile(const char* name, uint64_t bytes);
char* reserve_addresses(uint64_t bytes);  // aligned to a folio; touching the addresses is a fault
// Gets memory for a mapped range of a memfile; returns the number of bytes in folios of 2 MiB.
uint64_t make_resident(char* base, uint64_t bytes, bool huge);

}  // namespace staccato
