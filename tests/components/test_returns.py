"""Returns against brute force: sums written out step by step, episode by episode."""

import pytest
import torch

from rl_lab.components.returns import discounted, fold_n_step, gae, n_step, td_lambda

GAMMA, LAMBDA = 0.9, 0.7
SEEDS = range(6)


class Rollout:
    """Random data [T, B] with several episodes per column, ended by the world or by the clock."""

    def __init__(self, seed: int, time: int = 9, width: int = 4, chance: float = 0.3) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (time, width)
        self.rewards = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.values = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.next_values = torch.randn(shape, generator=generator, dtype=torch.float64)
        ended = torch.rand(shape, generator=generator) < chance
        by_world = torch.rand(shape, generator=generator) < 0.5
        self.terminated, self.truncated = ended & by_world, ended & ~by_world
        self.dones = ended
        self.discounts = GAMMA * (~self.terminated).double()
        self.inside = (~self.dones).double()

    def steps(self):
        time, width = self.rewards.shape
        return ((t, b) for t in range(time) for b in range(width))

    def brute_n_step(self, t: int, b: int, n: int) -> float:
        """Sum up to n rewards; stop at the end of the episode or the data; bootstrap unless the world ended."""
        total, weight = 0.0, 1.0
        for k in range(n):
            total += weight * self.rewards[t + k, b].item()
            weight *= GAMMA
            if self.terminated[t + k, b]:
                return total
            if self.truncated[t + k, b] or k == n - 1 or t + k == len(self.rewards) - 1:
                return total + weight * self.next_values[t + k, b].item()
        raise AssertionError

    def steps_left(self, t: int, b: int) -> int:
        """Count the steps from t to the end of its episode or of the data."""
        left = 1
        while not self.dones[t + left - 1, b] and t + left < len(self.rewards):
            left += 1
        return left

    def brute_lambda(self, t: int, b: int) -> float:
        """Weigh the n-step returns by (1 - lambda) lambda^(n - 1); the longest one has the rest of the weight."""
        longest = self.steps_left(t, b)
        total = sum((1 - LAMBDA) * LAMBDA ** (n - 1) * self.brute_n_step(t, b, n) for n in range(1, longest))
        return total + LAMBDA ** (longest - 1) * self.brute_n_step(t, b, longest)

    def brute_gae(self, t: int, b: int) -> float:
        total, weight = 0.0, 1.0
        for k in range(self.steps_left(t, b)):
            bootstrap = 0.0 if self.terminated[t + k, b] else GAMMA * self.next_values[t + k, b].item()
            total += weight * (self.rewards[t + k, b].item() + bootstrap - self.values[t + k, b].item())
            weight *= GAMMA * LAMBDA
        return total


def assert_equal_everywhere(computed: torch.Tensor, brute, rollout: Rollout) -> None:
    expected = torch.empty_like(computed)
    for t, b in rollout.steps():
        expected[t, b] = brute(t, b)
    torch.testing.assert_close(computed, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_gae(seed):
    r = Rollout(seed)
    computed = gae(r.rewards, r.values, r.next_values, r.discounts, LAMBDA * r.inside)
    assert_equal_everywhere(computed, r.brute_gae, r)


@pytest.mark.parametrize("seed", SEEDS)
def test_td_lambda_is_the_weighted_sum_of_n_step_returns(seed):
    r = Rollout(seed)
    computed = td_lambda(r.rewards, r.next_values, r.discounts, LAMBDA * r.inside)
    assert_equal_everywhere(computed, r.brute_lambda, r)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("seed", SEEDS)
def test_n_step(seed, n):
    r = Rollout(seed)
    computed = n_step(r.rewards, r.next_values, r.discounts, r.inside, n)
    assert_equal_everywhere(computed, lambda t, b: r.brute_n_step(t, b, n), r)


@pytest.mark.parametrize("seed", SEEDS)
def test_discounted_goes_to_the_end_of_the_episode(seed):
    r = Rollout(seed)
    computed = discounted(r.rewards, r.next_values, r.discounts, r.inside)
    assert_equal_everywhere(computed, lambda t, b: r.brute_n_step(t, b, 1000), r)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_functions_agree_where_they_must(seed):
    r = Rollout(seed)
    # When each next value is the value of the next step, advantages are lambda-returns minus values.
    values = torch.cat([r.values, r.next_values[-1:]])
    next_values = torch.where(r.dones, r.next_values, values[1:])
    traces = LAMBDA * r.inside
    advantages = gae(r.rewards, r.values, next_values, r.discounts, traces)
    returns = td_lambda(r.rewards, next_values, r.discounts, traces)
    torch.testing.assert_close(advantages, returns - r.values)
    one = n_step(r.rewards, r.next_values, r.discounts, r.inside, 1)
    torch.testing.assert_close(one, td_lambda(r.rewards, r.next_values, r.discounts, 0.0 * r.inside))


def test_truncation_bootstraps_and_termination_does_not():
    rewards = torch.tensor([[1.0, 1.0], [1.0, 1.0], [8.0, 8.0]])
    next_values = torch.full((3, 2), 10.0)
    terminated = torch.tensor([[False, False], [True, False], [False, False]])
    truncated = torch.tensor([[False, False], [False, True], [False, False]])
    discounts, inside = 0.5 * (~terminated).float(), (~(terminated | truncated)).float()
    returns = discounted(rewards, next_values, discounts, inside)
    # The reward of 8 belongs to the next episode and is never seen before the end.
    assert returns[0].tolist() == [1.0 + 0.5 * 1.0, 1.0 + 0.5 * (1.0 + 0.5 * 10.0)]
    assert returns[1].tolist() == [1.0, 1.0 + 0.5 * 10.0]
    assert returns[2].tolist() == [8.0 + 0.5 * 10.0] * 2


def test_one_step_is_enough():
    one = torch.ones(1, 3)
    for computed in (td_lambda(one, one, one, one), discounted(one, one, one, one), n_step(one, one, one, one, 4)):
        assert computed.tolist() == [[2.0] * 3]
    assert gae(one, one, one, one, one).tolist() == [[1.0] * 3]


def test_any_trailing_shape():
    r = Rollout(0)
    wide = [column.reshape(9, 2, 2) for column in (r.rewards, r.values, r.next_values, r.discounts, r.inside)]
    flat = gae(r.rewards, r.values, r.next_values, r.discounts, r.inside)
    assert torch.equal(gae(*wide).reshape(9, 4), flat)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_fold_n_step_against_a_loop(seed, n):
    r = Rollout(seed, time=n, width=7)
    rewards = r.rewards.clone()
    expected = []
    for b in range(7):
        total, last = 0.0, n - 1
        for k in range(n):
            total += GAMMA**k * rewards[k, b].item()
            if r.dones[k, b]:
                last = k
                rewards[k + 1 :, b] = float(1e6 * (b + 1))  # padding repeats whatever it likes
                break
        expected.append((total, GAMMA ** (last + 1), last))
    folded, discount, last = fold_n_step(rewards, r.dones, GAMMA)
    totals, discounts, lasts = (torch.tensor(column, dtype=torch.float64) for column in zip(*expected, strict=True))
    torch.testing.assert_close(folded, totals)
    torch.testing.assert_close(discount, discounts)
    assert last.tolist() == lasts.long().tolist()
    assert last.dtype == torch.int64


def test_padding_after_a_done_never_counts_even_if_it_is_done_again():
    dones = torch.tensor([[False], [True], [True], [False]])
    folded, discount, last = fold_n_step(torch.tensor([[1.0], [2.0], [100.0], [1000.0]]), dones, 0.5)
    assert (folded.item(), discount.item(), last.item()) == (2.0, 0.25, 1)
