"""Leases: taken together at admission, given back together when the last step in flight has returned."""

from scheduler_harness import Harness

from quire.enginecore.scheduling.leases import Leases


class Places:
    """A lease of a fixed number of places, one for each sequence; it writes down what happens."""

    def __init__(self, name, free, log):
        self.name, self.free, self.log, self.holders = name, free, log, []

    def need(self, seq):
        return 1

    def take(self, seq):
        self.free -= 1
        self.holders.append(seq)
        self.log.append(f"take {self.name}")

    def give_back(self, seq):
        self.free += 1
        self.holders.remove(seq)
        self.log.append(f"give back {self.name}")

    def check(self, held):
        assert self.holders == held


def test_what_is_taken_in_order_is_given_back_in_reverse():
    log = []
    a, b = Places("a", 2, log), Places("b", 1, log)
    leases = Leases(a, b)
    assert leases.are_enough("one")
    leases.take("one")
    leases.check(["one"])
    assert not leases.are_enough("two"), "there is no place in b"
    leases.give_back("one")
    leases.check([])
    assert log == ["take a", "take b", "give back b", "give back a"] and (a.free, b.free) == (2, 1)


def test_slots_and_blocks_are_held_until_the_last_step_in_flight_has_returned():
    h = Harness(max_num_seqs=2)
    h.add([1, 2, 3, 4, 5], max_tokens=8)
    slots, pool = h.scheduler.slots, h.scheduler.kv.pool
    assert (slots.free, pool.num_used) == (2, 0)
    h.schedule()
    h.schedule()
    assert (slots.free, pool.num_used) == (1, 2)
    h.scheduler.abort(0, 1)
    assert (slots.free, pool.num_used) == (1, 2), "two steps use them"
    h.collect()
    assert (slots.free, pool.num_used) == (1, 2), "one step does"
    h.collect()
    assert (slots.free, pool.num_used) == (2, 0)
