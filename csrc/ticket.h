// A ticket stands for one transfer: whoever holds it can ask, cancel, and let other work wait for it.
#pragma once
#include <atomic>
#include <optional>
#include <utility>

#include "backend.h"

namespace staccato {

class Ticket {
  public:
    Ticket(uint64_t id, uint64_t bytes) : id(id), bytes(bytes) {}

    const uint64_t id;  // in the order of submission: a ticket only ever waits for smaller ones
    const uint64_t bytes;
    std::atomic<bool> cancelled{false};

    // One of these two, once, by the thread that carries it out; it fails only when nothing is in flight any more.
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

    // Nothing of this transfer touches memory any more.
    bool over() const {
        try {
            return finished();
        } catch (const Error&) {
            return true;  // the device is gone, and the transfer with it
        }
    }

    bool succeeded() const {
        try {
            return finished();
        } catch (const Error&) {
            return false;
        }
    }

    // Throws what it failed of.
    bool finished() const {
        if (state() == FAILED) throw *error_;
        return state() == SUBMITTED && event_->done();
    }

    // Where it will be over; only when it isn't pending.
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
