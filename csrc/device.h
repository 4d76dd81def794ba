// A device: the pool, the move list of pages about to leave, and threads to copy, map ahead and unmap.
#pragma once
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pins.h"
#include "pool.h"
#include "ticket.h"

namespace staccato {

class Reservation;
using Lock = std::unique_lock<std::mutex>;
using Clock = std::chrono::steady_clock;

struct Deadline {
    explicit Deadline(double timeout_s) : forever(timeout_s < 0 || timeout_s > 1e9), timeout_s(timeout_s) {
        const std::chrono::duration<double> timeout(timeout_s);
        if (!forever) at = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
    }
    bool passed() const { return !forever && Clock::now() >= at; }
    bool forever;
    double timeout_s;
    Clock::time_point at;
};
inline const Deadline FOREVER(-1);

// A thread with a queue of jobs. A job must catch the job's errors.
class Worker {
  public:
    Worker() : thread_([this] { run(); }) {}
    ~Worker();  // finishes queued jobs
    void post(std::function<void()> job);

  private:
    void run();
    std::mutex mu_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    bool stopping_ = false;
    std::thread thread_;
};

// An entry of the move list: owns addresses and pages until the pages are really unmapped.
struct Leaving {
    Reservation* reservation;
    uint64_t first;  // slot
    std::vector<uint32_t> pages;
    std::vector<TicketPtr> after;
    int failures = 0;
    Clock::time_point not_before{};  // the next attempt
    bool hopeless() const { return failures >= 3; }  // still tried, no longer counted on
};

enum Operation { MAP = STC_FAULT_MAP, COPY = STC_FAULT_COPY, UNMAP = STC_FAULT_UNMAP, OPERATIONS };

class Device {
  public:
    explicit Device(const stc_config&);
    ~Device();

    const std::unique_ptr<Backend> backend;
    std::mutex mu;  // guards the members down to the next section; no call of the backend is made under the lock
    Pool pool;
    std::list<Leaving> move_list;  // only reap() takes entries out
    uint64_t promised = 0;         // pages promised to loads under way, not taken yet
    uint32_t next_owner = 1;
    uint64_t users = 0;  // reservations and pinned ranges
    stc_stats counted{};

    // -- functions that lock mu, except functions that take a Lock ---------------------------------------------------
    void announce();  // wakes waiting threads after a change; mu is held
    // Checks `condition`, with mu held, after every change; false if the deadline has passed.
    template <typename Condition>
    bool await(Lock& lock, const Deadline& deadline, Condition condition) {
        if (!deadline.forever) return changed_.wait_until(lock, deadline.at, condition);
        changed_.wait(lock, condition);
        return true;
    }
    uint64_t coming() const;                            // pages in limbo that will become free; mu is held
    std::string shortage(uint64_t pages_wanted) const;  // reason why pages are short; mu is held

    // Make a ticket and post the job under one lock of mu, so that a queue has jobs in the order of tickets.
    TicketPtr new_ticket(uint64_t bytes);
    TicketPtr find_ticket(uint64_t id);  // null if the ticket is over
    void await_submission(Ticket&, const Deadline&);
    void await_ticket(Ticket&, const Deadline&);

    void leave(Reservation&, uint64_t first, std::vector<uint32_t> pages, std::vector<TicketPtr> after);  // mu is held
    void settle(const Deadline&);

    // Operations of the backend: each fails if the fault injector says so, and is counted.
    void map(uint64_t address, uint32_t first_page, uint64_t count);
    void allow(uint64_t address, uint64_t bytes);
    void unmap(uint64_t address, uint64_t bytes);
    void copy(Lane, const Copy&, Direction);
    void zero(Lane, uint64_t address, uint64_t bytes);

    void drain(Lane) noexcept;  // waits until no work of the lane is in flight

    void pin(char* base, uint64_t bytes);  // begins to register the range; copies wait for their extents
    void unpin(char* base);                // waits for copies from and to the range
    void await_pins(const Deadline&);      // waits until every range is registered, as far as the limit goes

    void inject(int operation, uint64_t nth);
    void throttle(double bytes_per_s);
    stc_stats stats();
    void close();  // throws while the device is in use

  private:
    void fault(Operation);
    void pace(Direction, uint64_t bytes);
    void reap();
    bool take_away(Leaving&);
    std::vector<TicketPtr> tickets_to_check();
    void forget(const std::vector<TicketPtr>& finished);

    std::condition_variable changed_;
    uint64_t changes_ = 0;
    std::unordered_map<uint64_t, TicketPtr> tickets_;  // unfinished and failed tickets
    uint64_t next_ticket_ = 1;
    uint64_t check_tickets_at_ = 256;
    std::array<std::atomic<uint64_t>, OPERATIONS> faults_{};
    std::mutex pace_mu_;
    double bytes_per_s_ = 0;
    std::array<Clock::time_point, 2> link_free_at_{};
    bool stopping_ = false;
    Pins pins_;
    std::thread reaper_;

  public:
    // Last members, so that threads finish their jobs before other members are destroyed.
    std::array<Worker, LANES> lanes;
    Worker mapper;
    Worker grower;  // a load's mapping may wait long, and the growth of another reservation does not wait behind it
    Worker pinner;
};

}  // namespace staccato
