// What the library throws inside; api.cpp turns it into a code and a sentence.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "staccato_memory.h"

namespace staccato {

struct Error : std::runtime_error {
    Error(int code, const std::string& message) : std::runtime_error(message), code(code) {}
    int code;
};

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(int code, const char* format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    throw Error(code, message);
}

inline Error as_error(const std::exception& thrown) {
    if (auto error = dynamic_cast<const Error*>(&thrown)) return *error;
    return Error(STC_NO_MEMORY, thrown.what());  // bad_alloc and its kin
}

inline double mebibytes(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace staccato
