"""Gradient averaging without a process group: what is sent, in which order, and what comes back."""

import pytest
import torch
from torch import nn

from eagleray.actors.trainer.collectives import Collectives
from eagleray.actors.trainer.reducer import GradientReducer
from eagleray.actors.trainer.seams import Seat

WORLD_SIZE = 2


class Sent:
    def wait(self) -> None:
        """It has come."""


class Peers(Collectives):
    """One more rank, whose figures are three times ours; notes sizes of what was sent.

    The last bucket holds two numbers more.
    """

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(Seat(0, WORLD_SIZE))
        self._sizes = sizes

    def begin_sum(self, flat: torch.Tensor) -> Sent:
        self._sizes.append(flat.numel())
        flat.mul_(4)
        return Sent()


@pytest.fixture
def sent() -> list[int]:
    """Sizes of what was sent."""
    return []


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((size,), float(size))) for size in (3, 2, 1)]


def make(trained: list[nn.Parameter], sent: list[int]) -> GradientReducer:
    return GradientReducer(trained, WORLD_SIZE, Peers(sent), bucket_bytes=1)


def test_buckets_leave_while_the_backward_runs_the_last_parameters_first(sent: list[int]) -> None:
    trained = parameters()
    reducer = make(trained, sent)
    reducer.arm()
    sum((p.square().sum() for p in trained), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    # Nobody can finish the step before this rank says so.
    assert sent == [1, 2]
    reducer.wait()
    assert sent == [1, 2, 3 + 2]
    for parameter in trained:
        assert parameter.grad is not None
        # Ours is 2p, the other's 6p.
        assert torch.equal(parameter.grad, 4 * parameter.detach())


def test_a_parameter_without_gradient_changes_no_order(sent: list[int]) -> None:
    trained = parameters()
    reducer = make(trained, sent)
    reducer.arm()
    (trained[0].sum() + trained[1].sum()).backward()
    assert sent == []
    reducer.wait()
    assert sent == [1, 2, 3 + 2]
    assert trained[2].grad is not None
    assert trained[2].grad.tolist() == [0.0]
    assert trained[0].grad is not None
    assert trained[0].grad.tolist() == [2.0] * 3


def test_a_number_is_averaged_with_the_last_bucket(sent: list[int]) -> None:
    trained = parameters()
    reducer = make(trained, sent)
    for value in (1.5, float("inf"), 2.0):
        reducer.arm()
        sum((p.square().sum() for p in trained), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        assert reducer.wait(value) == (2 * value, False)
    assert GradientReducer(trained, 1).wait(0.1) == (0.1, False)


def test_accumulated_gradients_are_sent_once(sent: list[int]) -> None:
    (weight,) = trained = parameters()[:1]
    reducer = make(trained, sent)
    for step in range(2):
        weight.grad = None
        weight.sum().backward()
        assert len(sent) == step
        reducer.arm()
        weight.sum().backward()
        reducer.wait()
        assert len(sent) == step + 1
        assert weight.grad.tolist() == [4.0] * 3


def test_a_weight_that_is_used_twice_is_sent_when_both_gradients_are_in(sent: list[int]) -> None:
    (weight,) = trained = parameters()[:1]
    reducer = make(trained, sent)
    reducer.arm()
    (weight.sum() + (2 * weight).sum()).backward()
    reducer.wait()
    assert sent == [3 + 2]
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 3


def test_a_vote_of_any_rank_is_known_to_all_and_touches_no_gradient(sent: list[int]) -> None:
    class Silent(Peers):
        """One more rank, which brings nothing."""

        def begin_sum(self, flat: torch.Tensor) -> Sent:
            return Sent()

    class Voting(Peers):
        """One more rank, which votes."""

        def begin_sum(self, flat: torch.Tensor) -> Sent:
            flat[-1] += 1
            return Sent()

    for peers, own, found in ((Silent, 0, 0), (Silent, 1, 1), (Voting, 0, 1), (Voting, 1, 1)):
        trained = parameters()
        reducer = GradientReducer(trained, WORLD_SIZE, peers(sent))
        reducer.arm()
        sum((p.sum() for p in trained), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        assert reducer.wait(vote=bool(own))[1] == bool(found)
        # Averaged over two ranks, one of which brought nothing.
        assert all(p.grad is not None and set(p.grad.tolist()) == {0.5} for p in trained)


def test_a_rank_that_is_alone_decides_for_itself() -> None:
    reducer = GradientReducer(parameters(), 1)
    assert reducer.wait(2.0, vote=True) == (2.0, True)
    assert reducer.wait(2.0) == (2.0, False)
