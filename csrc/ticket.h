// A ticket stands for a transfer: a holder can poll, cancel, and let other work wait for the transfer.
#pragma once
#include <atomic>
#include <optional>
#include <utility>

#include "backend.h"

namespace staccato {

class Ticket {
  public:
    Ticket(uint64_t id, uint64_t bytes) : id(id), bytes(bytes) {}

    const uint64_t id;  // in the order of submission: a ticket waits only for tickets with smaller ids
    const uint64_t bytes;
    std::atomic<bool> cancelled{false};

    // The thread that carries out the transfer calls `submit` or `fail`, once; `fail` only with no copy in flight.
    void submit(EventPtr event) {
        event_ = std::move(event);
        state_.store(SUBMITTED, std::memory_order_release);
    }
    void fail(const Error& error) {
        error_ = error;
        state_.store(FAILED, std::memory_order_release);
    }
    void land(uint64_t more) { landed_.fetch_add(more, std::memory_order_relaxed); }

    bool pending() const { return state() == PENDING; }

    // Whether the transfer touches memory no more.
    bool over() const {
        try {
            return finished();
        } catch (const Error&) {
            return true;  // the transfer failed, or the device is gone
        }
    }

    bool succeeded() const {
        try {
            return finished();
        } catch (const Error&) {
            return false;
        }
    }

    // Whether the transfer succeeded by now; throws the error of a failed transfer.
    bool finished() const {
        if (state() == FAILED) throw *error_;
        return state() == SUBMITTED && event_->done();
    }

    // The event at the end of the transfer; call only if the transfer is not pending.
    Event& event() const {
        if (state() == FAILED) throw *error_;
        return *event_;
    }

    uint64_t landed() const { return succeeded() ? bytes : landed_.load(std::memory_order_relaxed); }

  private:
    enum State { PENDING, SUBMITTED, FAILED };
    State state() const { return state_.load(std::memory_order_acquire); }

    std::atomic<State> state_{PENDING};
    std::atomic<uint64_t> landed_{0};
    EventPtr event_;
    std::optional<Error> error_;
};
using TicketPtr = std::shared_ptr<Ticket>;

}  // namespace staccato
