// Exceptions inside the library; api.cpp turns an exception into a code and a sentence.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "staccato_memory.h"

namespace staccato {

struct Error : std::runtime_error {
    Error(int code, const std::string& message) : std::runtime_error(message), code(code) {}
    int code;
};

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream stream;
    (stream << ... << parts);
    return stream.str();
}

template <typename... Parts>
[[noreturn]] void fail(int code, const Parts&... parts) {
    throw Error(code, text(parts...));
}

inline Error as_error(const std::exception& thrown) {
    if (auto error = dynamic_cast<const Error*>(&thrown)) return *error;
    return Error(STC_NO_MEMORY, thrown.what());  // bad_alloc and its kin
}

inline double mebibytes(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

}  // namespace staccato
