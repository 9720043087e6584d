"""Policies, scorers and filters in Python."""

import asyncio
import sys

import pytest

from pointsman import Router, errors

WORKERS = {n: f"http://{n}" for n in range(1, 5)}


def test_a_policy_chooses_the_rank(run):
    def last(request, candidates):
        assert request["prompt_tokens"] == 3 and [row["rank"]["worker"] for row in candidates] == [1, 2, 3, 4]
        return len(candidates) - 1

    last.needs = "board"

    async def scenario():
        async with Router(block_size=16, workers=WORKERS, policy=last) as router:
            placements = await asyncio.gather(*(router.route([1, 2, 3]) for _ in range(20)))
            assert {placement.worker for placement in placements} == {4}
            for placement in placements:
                placement.free()
            assert router.health()["leases"] == 0

    run(scenario())


def test_unusable_choices_are_errors_of_the_request(run, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))

    def policy(request, candidates):
        match request["prompt_tokens"]:
            case 1:
                return None
            case 2:
                return 99
            case 3:
                raise LookupError("no such rank")
        return 0

    async def scenario():
        async with Router(block_size=16, workers=WORKERS, policy=policy) as router:
            for length, reason in ((1, "policy_refused"), (2, "policy_out_of_range"), (3, "policy_refused")):
                with pytest.raises(errors.Internal) as failed:
                    await router.route(range(length))
                assert failed.value.reason == reason
            async with await router.route(range(4)) as placement:
                assert placement.worker == 1

    run(scenario())
    assert seen == ["no such rank"]


def test_filters_and_scorers_apply_to_the_policies_of_the_library(run):
    def even(request, rank, traits):
        assert traits["taints"] == set()
        return rank[0] % 2 == 0

    def away_from_two(request, candidate):
        return 1000.0 * (candidate["rank"]["worker"] == 2)

    async def scenario():
        async with Router(block_size=16, workers=WORKERS, policy="kv", filters=[even], scorers=[away_from_two]) as router:
            async with await router.route([1, 2, 3]) as placement:
                assert placement.worker == 4
            explanation = await router.explain([1, 2, 3])
            assert [row["excluded_by"] for row in explanation["ranks"]] == ["custom", None, "custom", None]

    run(scenario())


def test_a_policy_with_unknown_needs_is_an_error(run):
    def policy(request, candidates):
        return 0

    policy.needs = "everything"
    with pytest.raises(ValueError, match="everything"):
        run(Router(policy=policy).start())
