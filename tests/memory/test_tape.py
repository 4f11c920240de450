"""The walk over a tape, on tapes small enough to follow by hand."""

from __future__ import annotations

from tightfit.memory.tape import Slot, Tape, measure


def test_a_chain_frees_what_nobody_keeps() -> None:
    tape, x = Tape(), Slot(10, True)
    a = tape.op((x,), 100)
    b = tape.op((a,), 20)
    cost = measure(tape, x, b)
    assert cost.saved == 0
    assert cost.output == 20
    assert cost.forward == cost.forward_unsaved == 120
    assert cost.recompute == 0  # nothing to make again
    assert cost.backward == 120  # b's gradient and a's; then a's and x's
    assert cost.input_grad == 10


def test_what_is_kept_stays_until_its_backward() -> None:
    tape, x = Tape(), Slot(10, True)
    a = tape.op((x,), 100, saves=(x,))
    b = tape.op((a,), 20, saves_output=True)
    c = tape.op((b,), 30)
    cost = measure(tape, x, c)
    assert cost.saved == 10 + 20
    assert cost.forward == 10 + 100 + 20
    assert cost.recompute == 10 + 100 + 20  # stops when b is there
    assert cost.backward == 30 + 20 + 100  # kept, b's gradient, a's gradient


def test_a_recomputation_stops_before_the_last_product() -> None:
    tape, x = Tape(), Slot(10, True)
    a = tape.op((x,), 50)
    b = tape.op((a,), 1000, saves=(a,), weight_grad=7)
    cost = measure(tape, x, b)
    assert cost.forward == 1050
    assert cost.recompute == 50


def test_a_view_shares_its_storage() -> None:
    tape, x = Tape(), Slot(10, True)
    whole = tape.op((x,), 60)
    first, second = tape.split(whole, (20, 40))
    out = tape.op((first, second), 5, saves=(first,))
    cost = measure(tape, x, out)
    assert cost.saved == 60
    assert cost.forward == 65
    # kept, the output's gradient and those of the parts; then these and the joined one
    assert cost.backward == max(60 + 5 + 60, 60 + 60)


def test_weight_gradients_are_handed_over_or_kept() -> None:
    tape, x = Tape(), Slot(10, True)
    a = tape.op((x,), 10, saves=(x,), weight_grad=500)
    b = tape.op((a,), 10, saves=(a,), weight_grad=300)
    cost = measure(tape, x, b)
    assert cost.weight_grads == 800
    assert cost.backward == 10 + 10 + 10 + 500
    assert cost.backward_kept == 10 + 10 + 10 + 500 + 300
    assert cost.arrivals == ((300, 20), (500, 10))


def test_a_second_gradient_is_added_in_place() -> None:
    tape, x = Tape(), Slot(10, True)
    left, right = tape.op((x,), 10), tape.op((x,), 10)
    cost = measure(tape, x, tape.op((left, right), 10, passes=True))
    # Both branches read one gradient, which the sum passed on. The right one makes x's; the left one's is added
    # to it and gone.
    assert cost.backward == 10 + 10 + 10
    assert cost.input_grad == 10


def test_a_gradient_that_is_shared_is_copied_before_adding() -> None:
    tape, x = Tape(), Slot(10, True)
    inner = tape.op((x,), 10)
    cost = measure(tape, x, tape.op((x, inner), 10, passes=True))
    # The residual's gradient is the output's own; by the time the branch is back nobody else has it.
    assert cost.backward == 20
    tape, y = Tape(), Slot(10, True)
    first = tape.op((y,), 10, passes=True)
    cost = measure(tape, y, tape.op((y, first), 10, passes=True))
    assert cost.backward == 20  # here both are the same tensor, so their sum is a new one


def test_a_variable_holds_its_tensor() -> None:
    tape, x = Tape(), Slot(10, True)
    a = tape.op((x,), 100)
    b = tape.op((a,), 20)
    c = tape.op((b,), 30)
    tape.hold(a)
    cost = measure(tape, x, c)
    assert cost.forward == 150
    assert cost.saved == 0


def test_states_of_a_loop_add_up_only_where_they_are_kept() -> None:
    tape, x = Tape(), Slot(10, True)
    out = tape.op((x,), 10, keeps=(1000,), forward_temp=5)
    cost = measure(tape, x, out)
    assert cost.saved == 1000
    assert cost.forward == 1015
    assert cost.forward_unsaved == 15


def test_nothing_is_kept_where_no_gradient_flows() -> None:
    tape, x = Tape(), Slot(10, False)
    out = tape.op((x,), 20, saves=(x,), makes=(30,))
    cost = measure(tape, x, out)
    assert cost.saved == 0
    assert cost.forward == 50
    assert cost.input_grad == 0
