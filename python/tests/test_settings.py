"""Types of settings, options and results beside the values of the library."""

import re
import typing

import pytest

from pointsman import Router, results, settings

#: Each typed dictionary with its place in the settings of a router. The root has the names of all sections.
SETTINGS = [
    ((), settings.RouterSettings),
    (("policy",), settings.KvPolicy, {"name": "kv"}),
    (("policy",), settings.LatencyPolicy, {"name": "latency"}),
    (("index",), settings.Index),
    (("index", "speculative"), settings.Speculative),
    (("events",), settings.Events),
    (("load",), settings.Load),
    (("engine_load",), settings.EngineLoadPolls),
    (("queue",), settings.Queue),
    (("queue", "classes", 0), settings.QueueClass, {"name": "a"}),
    (("queue", "uncached_buckets", 0), settings.UncachedBucket),
    (("overload",), settings.Overload),
    (("health",), settings.HealthChecks),
    (("slow_start",), settings.SlowStart),
    (("shared_cache",), settings.SharedCache),
    (("session",), settings.Session),
    (("discovery",), settings.Discovery),
    (("supervision",), settings.Supervision),
    (("shadow",), settings.Shadow),
    (("recorder",), settings.Recorder),
    (("replicas",), settings.Replicas),
]
OPTIONS = [
    ((), settings.RequestOptions),
    (("mm_spans", 0), settings.MmSpan),
    (("constraints",), settings.Constraints),
    (("constraints", "pin"), settings.Pin),
    (("overrides",), settings.Overrides),
]
WORKERS = [
    ((), settings.WorkerSettings, {"endpoint": "http://a"}),
    (("kv_events",), settings.KvEvents),
]


def cases(listed):
    """Wrong values with the names that their errors must list: a name for each dictionary, and a value for each choice."""
    for path, hint, *given in listed:
        names = set(typing.get_type_hints(hint))
        yield pytest.param(path, dict(*given, no_such_name=1), names - {*dict(*given)} | names & {"endpoint"}, id=hint.__name__)
        for name, field in typing.get_type_hints(hint).items():
            choices = {choice for part in (field, *typing.get_args(field)) for choice in literals(part)}
            if choices and not any(typing.is_typeddict(part) for part in typing.get_args(field)) and name != "name":
                yield pytest.param((*path, name), "no_such_choice", choices, id=f"{hint.__name__}.{name}")


def literals(hint):
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def refusal(run, path, value, call):
    """The names that the error of a wrong value lists."""
    for name in reversed(path):
        value = [value] if name == 0 else {name: value}

    async def refused():
        with pytest.raises(ValueError, match="no_such_") as refused:
            await call(value)
        return str(refused.value)

    message = run(refused())
    return message, set(re.findall(r"`(\w+)`", message.partition(", expected ")[2])) - {"name"}


@pytest.mark.parametrize(("path", "value", "names"), [*cases(SETTINGS)])
def test_types_of_settings_have_the_names_of_the_library(run, path, value, names):
    message, listed = refusal(run, path, value, lambda config: Router(config).start())
    assert listed == names - {"name"}, message


@pytest.mark.parametrize(("path", "value", "names"), [*cases(OPTIONS)])
def test_types_of_options_have_the_names_of_the_library(run, path, value, names):
    async def route(options):
        async with Router(workers=["http://a"]) as router:
            await router.route([1], **options)

    message, listed = refusal(run, path, value, route)
    assert listed == names, message


@pytest.mark.parametrize(("path", "value", "names"), [*cases(WORKERS)])
def test_types_of_workers_have_the_names_of_the_library(run, path, value, names):
    async def start(worker):
        await Router(workers=[{"endpoint": "http://a", **worker}]).start()

    message, listed = refusal(run, path, value, start)
    assert listed == names, message


def conforms(value, hint):
    """Whether a value has the type of a hint, with all names of its dictionaries."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint)
        named = isinstance(value, dict) and hint.__required_keys__ <= value.keys() <= hints.keys()
        return named and all(conforms(part, hints[name]) for name, part in value.items())
    if origin is typing.Literal:
        return value in arguments
    if origin is list:
        return isinstance(value, list) and all(conforms(part, arguments[0]) for part in value)
    if origin is tuple:
        return isinstance(value, tuple) and [type(part) for part in value] == [*arguments]
    if arguments:
        return any(conforms(value, part) for part in arguments)
    return isinstance(value, (float, int) if hint is float else hint)


def test_results_have_their_types(run):
    async def scenario():
        async with Router(block_size=16, workers=["http://a", "http://b"], seed=1) as router:
            assert conforms(router.health(), results.Health) and conforms(Router().health(), results.Health)
            tokens = list(range(100))
            async with await router.route(tokens, routing_hashes=True) as placement:
                assert conforms(placement.facts(), results.Decision), placement.facts()
                assert all(conforms(report, results.RankReport) for report in router.rank_reports())
            for found, hint in (
                (await router.find_best_match(tokens, routing_hashes=True), results.Decision),
                (await router.explain(tokens), results.Explanation),
                (await router.overlap_scores(tokens), results.OverlapScores),
                (await router.potential_loads(tokens), list[results.PotentialLoad]),
            ):
                assert conforms(found, hint), found
            pin = {"pin": {"worker": next(iter(router.workers()))}}
            explained = await router.explain(tokens, constraints=pin)
            assert conforms(explained, results.Explanation)
            assert sorted(rank["excluded_by"] or "" for rank in explained["ranks"]) == ["", "pin"]

    run(scenario())
