// Ranges of the host's memory that a device's driver may copy from and to at full speed: registered (pinned) in extents.
//
//   announce ──▶ waiting ──in the background, or by the first copy──▶ registered ──withdraw, or room for another──▶ gone
//
// A copy waits until its extent is registered. While a limit is set, the least recently used extents make room.
#pragma once
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>

#include "backend.h"

namespace staccato {

class Pins {
  public:
    // limit: most bytes registered at a time, 0: no limit. drain: waits until no work of a lane is in flight.
    Pins(Backend& backend, uint64_t limit, std::function<void(Lane)> drain);

    void announce(char* base, uint64_t bytes);  // throws if the range overlaps an announced range
    void fill(char* base);      // registers a range, within the limit: the work of a background thread; never throws
    void withdraw(char* base);  // waits for copies from and to the range, then unregisters the range
    bool idle() const;          // whether no announced range waits for `fill`

    // Calls `issue` for parts of the copy, each in one registered extent. Throws if a part lies in no announced range,
    // or can't be registered.
    void each(const Copy&, Lane, const std::function<void(const Copy&)>& issue);

    void add_to(stc_stats&) const;

  private:
    enum State { WAITING, CHANGING, REGISTERED };
    struct Extent {
        char* range;  // first byte of the announced range
        uint64_t bytes;
        State state = WAITING;
        uint64_t holds = 0;    // copies about to be issued
        unsigned lanes = 0;    // bits of lanes with copies issued since the registration
        uint64_t used_at = 0;  // in the order of uses
    };
    using Lock = std::unique_lock<std::mutex>;
    using Extents = std::map<char*, Extent>;  // by first byte

    Extents::iterator extent_of(const char* host);
    void register_it(Lock&, Extents::iterator);
    void unregister(Lock&, Extents::iterator);
    bool make_room(Lock&, uint64_t bytes);
    void issue_row(Copy, Lane, const std::function<void(const Copy&)>& issue);
    void issue_part(const Copy&, Lane, const std::function<void(const Copy&)>& issue);

    Backend& backend_;
    const uint64_t limit_, extent_bytes_;
    const std::function<void(Lane)> drain_;
    mutable std::mutex mu_;  // guards the members below; no call of the backend is made under the lock
    std::condition_variable changed_;
    Extents extents_;
    uint64_t filling_ = 0;  // ranges announced and not filled yet
    uint64_t registered_bytes_ = 0, uses_ = 0, calls_ = 0;
    double seconds_ = 0;
};

}  // namespace staccato
