// Exceptions inside the library; api.cpp turns an exception into a code and a sentence.
#pragma once
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "staccato_memory.h"

namespace staccato {

struct Error : std::runtime_error {
    Error(int code, const std::string& message) : std::runtime_error(message), code(code) {}
    int code;
};

// No streams: where libstdc++ is linked statically, and the process has another libstdc++ as well, streams of the two mix.
template <typename Part>
std::string word(const Part& part) {
    if constexpr (std::is_floating_point_v<Part>) {
        char number[32];
        std::snprintf(number, sizeof number, "%g", static_cast<double>(part));
        return number;
    } else if constexpr (std::is_same_v<Part, void*>) {
        char address[32];
        std::snprintf(address, sizeof address, "%p", part);
        return address;
    } else if constexpr (std::is_arithmetic_v<Part>) {
        return std::to_string(part);
    } else {
        return part;
    }
}

template <typename... Parts>
std::string text(const Parts&... parts) {
    return (std::string() + ... + word(parts));
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
