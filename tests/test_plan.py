"""How roles run: what the user sets is taken, what is left out is taken from [train], and what `auto` becomes. Planning needs no torch."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import plans
import pytest

from fulltilt import footprint
from fulltilt.parallel.layout import UNSHARDED, Sharding
from fulltilt.plan.budgets import Budgets
from fulltilt.plan.cache import decode_bytes, prefill_bytes, uses_graphs
from fulltilt.plan.decisions import RolePlan, RoleSettings, given_decisions
from fulltilt.plan.division import Division, choose_division, divided, how_it_fits, pairs_of_sizes
from fulltilt.plan.facts import Facts, RoleFacts, RoleSizes
from fulltilt.plan.make import Plan, check_context, make_plan, plan_of
from fulltilt.plan.micro_batches import micro_batch_tokens
from fulltilt.plan.resident import SLACK, check_loading, loading_order, most_while_loading, resident, returning
from fulltilt.plan.roles import on_host, plan_roles
from fulltilt.plan.sharding import choose_sharding
from fulltilt.plan.words import graphs_in_words
from fulltilt.records import UserError
from fulltilt.schema import Config, value_of
from fulltilt.shape import QWEN2, SHAPES, Shape

GIB = 1 << 30
RESPONSE = 256  # tokens, as the configuration has it


def config(**sections: dict[str, Any]) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "t"}, **sections})


def transformer(billions: float, *, learns: bool = True, itemsize: int = 2, head: bool = False) -> RoleFacts:
    """Of the shape of Qwen2.5-7B, whatever its number of parameters; without its head, for one thing at a time."""
    count = int(billions * 1e9)
    return RoleFacts(Shape.named("7B"), itemsize * count, count if learns else 0, itemsize, fused=True, vocabulary_head=head)


def hardware(device_gib: float = 140, host_gib: float = 1000, longest: int = 2048, **roles: RoleFacts) -> Facts:
    """`longest`: tokens of the longest sample."""
    return Facts("cuda", int(device_gib * GIB), int(host_gib * GIB), roles or {"actor": transformer(0.5)}, longest - RESPONSE, 5)


def settled(where: Facts, **sections: dict[str, Any]) -> RolePlan:
    return plan_roles(config(**sections), where)


# -- what is given ----------------------------------------------------------------------------------------------------------------------


def test_a_small_model_on_a_large_device_runs_by_the_defaults() -> None:
    found = settled(hardware(actor=transformer(0.5), ref=transformer(0.5, learns=False)))
    assert dict(found.settings) == {"actor": RoleSettings(), "ref": RoleSettings()} and found.words == ()


def test_what_is_set_is_taken_as_it_is() -> None:
    train = {
        "packing": False, "recompute": "full", "recompute_layers": 3, "recompute_method": "uniform", "offload_activations": True,
        "offload_params": True, "offload_optimizer": True, "offload_grads": True, "fused_head": False, "entropy_chunk": 7,
        "entropy_recompute": False,
    }  # fmt: skip
    found = settled(hardware(), train=train)
    assert found.settings["actor"] == RoleSettings(**train)
    assert found.words == (
        "actor: samples padded to the longest of their micro-batch; full recompute, 3 layers at a time; activations on the host until the "
        "backward pass; parameters on the host while another role works; optimizer on the host; gradients only while an optimizer step is "
        "made; whole logits; entropy of at most 7 tokens at a time; softmax kept for the entropy's gradient",
    )


def test_words_say_what_a_fused_head_does() -> None:
    where = hardware(actor=transformer(0.5), ref=transformer(0.5, learns=False))
    found = settled(where, train={"entropy_chunk": 100_000, "entropy_recompute": False}, ref={"entropy_chunk": 4})
    assert found.words == (
        "actor: log-probs and entropy of at most 100000 tokens at a time; logits of all tokens kept for the entropy's gradient",
        "ref: log-probs of at most 4 tokens at a time",  # it has no entropy
    )


def test_more_layers_than_a_role_has_are_refused_where_the_key_says_so() -> None:
    two_layers = replace(Shape.named("7B"), layers=Shape.named("7B").layers[:2])
    where = hardware(actor=transformer(0.5), critic=replace(transformer(0.5), shape=two_layers))
    for sections, refused in (
        ({"train": {"recompute": "full", "recompute_layers": 3}}, r"train\.recompute_layers is 3, and the model has 2 layers \(critic\)"),
        ({"train": {"recompute_layers": 3}, "critic": {"recompute": "full"}}, r"the model has 2 layers \(critic\)\. Give at most 2"),
        ({"train": {"recompute": "full", "recompute_layers": 29}, "critic": {"recompute": "none"}}, r"has 28 layers \(actor\)"),
    ):
        for device in ("cuda", "cpu"):
            with pytest.raises(UserError, match=refused):
                settled(replace(where, device=device), **sections)
    settled(where, train={"recompute": "full", "recompute_layers": 3}, critic={"recompute": "none"})


def test_false_is_taken_where_auto_would_switch_it_on() -> None:
    crowded = hardware(device_gib=80, actor=transformer(7), ref=transformer(7, learns=False))
    off = {"recompute": "none", "offload_activations": False, "offload_params": False, "offload_optimizer": False, "offload_grads": False}
    found = settled(crowded, train=off, ref={"offload_params": False})
    assert dict(found.settings) == {"actor": RoleSettings(), "ref": RoleSettings()}


ROLES = {
    "actor": transformer(0.5),
    "critic": transformer(0.5),
    "ref": transformer(0.5, learns=False),
    "reward_model": transformer(0.5, learns=False),
}


def test_the_critic_takes_from_train_what_it_has_not_of_its_own() -> None:
    train = {"packing": False, "recompute": "selective", "recompute_layers": 2, "offload_activations": True, "offload_optimizer": True}
    found = settled(hardware(**ROLES), train={**train, "fused_head": False, "entropy_chunk": 5}).settings
    assert found["critic"] == RoleSettings(**train, offload_grads=True)  # it has no vocabulary head
    own = {"packing": True, "recompute": "none", "offload_activations": False, "offload_params": True, "offload_optimizer": False}
    found = settled(hardware(**ROLES), train=train, critic=own).settings
    assert found["critic"] == RoleSettings(**own, recompute_layers=2) and found["actor"].recompute == "selective"


def test_roles_that_do_not_learn_take_what_concerns_them() -> None:
    train = {"packing": False, "recompute": "full", "offload_params": True, "offload_optimizer": True, "fused_head": False}
    found = settled(
        hardware(**ROLES), train={**train, "entropy_chunk": 5}, ref={"entropy_chunk": 9}, reward_model={"packing": True}
    ).settings
    assert found["ref"] == RoleSettings(packing=False, fused_head=False, entropy_chunk=9)
    assert found["reward_model"] == RoleSettings()
    assert settled(hardware(**ROLES), train=train).settings["reward_model"] == RoleSettings(packing=False)


# -- auto -------------------------------------------------------------------------------------------------------------------------------


def test_on_the_cpu_auto_is_off() -> None:
    where = replace(hardware(**ROLES), device="cpu", device_bytes=0)
    assert set(settled(where).settings.values()) == {RoleSettings()}


def test_the_optimizer_leaves_where_less_than_a_fifth_would_stay_free() -> None:
    """18 bytes a parameter: 2 of it, 4 of its gradient, 12 of master and moments."""
    for billions, away in ((6.5, False), (7, True)):
        found = settled(hardware(device_gib=140, actor=transformer(billions)), actor={"token_budget": 512}).settings["actor"]
        assert (18 * billions * 1e9 > 0.8 * 140 * GIB) == away == found.offload_optimizer == found.offload_grads
    found = settled(hardware(device_gib=140, actor=transformer(7)), actor={"token_budget": 512})
    assert found.words[0].startswith(
        "actor: optimizer on the host (auto: parameters, gradients and optimizer would take 117.3 GiB of the device's 140.0 GiB); "
        "gradients only while an optimizer step is made (auto: with the optimizer)"
    )


def test_float32_parameters_are_their_own_masters() -> None:
    held = {itemsize: transformer(1, itemsize=itemsize).held(UNSHARDED) for itemsize in (2, 4, 8)}
    assert [own.optimizer for own in held.values()] == pytest.approx([12e9, 8e9, 16e9])
    assert [own.gradients for own in held.values()] == pytest.approx([4e9, 4e9, 8e9])


def test_parameters_of_roles_that_wait_leave_where_the_optimizer_is_not_enough() -> None:
    roles = {"actor": transformer(7), "critic": transformer(7), "ref": transformer(7, learns=False)}
    found = settled(hardware(device_gib=140, **roles)).settings
    assert [role.offload_params for role in found.values()] == [False, False, False]  # optimizers alone make the room
    found = settled(hardware(device_gib=70, **roles)).settings
    assert [role.offload_params for role in found.values()] == [False, False, True]  # no more than must
    found = settled(hardware(device_gib=60, **roles)).settings
    assert found["ref"].offload_params and found["critic"].offload_params
    assert not found["actor"].offload_params  # graphs read its weights by their address
    assert all(found[role].offload_optimizer and found[role].offload_grads for role in ("actor", "critic"))


def test_a_reference_that_is_the_actor_has_no_parameters_to_send_away() -> None:
    found = settled(hardware(device_gib=20, actor=transformer(7))).settings
    assert found["actor"].offload_optimizer and not found["ref"].offload_params
    assert settled(hardware(actor=transformer(0.5)), train={"fused_head": False}).words == ("actor: whole logits",)


def test_recompute_is_the_least_that_fits() -> None:
    actor = transformer(0.5)
    tokens = 16384
    none, selective, full = (actor.update_bytes(tokens, {"recompute": kind}) for kind in ("none", "selective", "full"))
    assert none > selective > full
    taken = 18 * actor.trained
    for left, kind in ((none, "none"), (selective, "selective"), (full, "full"), (full - GIB, "full")):
        where = hardware(device_gib=(left + taken + 1e6) / GIB / (1 - 1 / 16), actor=actor)
        found = settled(where, train={"offload_optimizer": False}).settings["actor"]
        assert found.recompute == kind, left
        assert found.offload_activations == (left < full - 1)
        compiled = settled(where, train={"offload_optimizer": False, "compile": True}).settings["actor"]
        assert compiled.recompute == ("none" if kind == "none" else "full")  # compiled layers have no selective recompute


def test_the_estimate_of_a_known_case() -> None:
    """A model of 7B held about 70 GiB for 16,384 tokens with few kernels a layer, and about 3 GiB of layers' inputs with full recompute."""
    held = {kind: 16384 * transformer(7).kept_bytes({"recompute": kind}) / GIB for kind in ("none", "selective", "full")}
    assert 60 < held["none"] < 80 and 2.5 < held["full"] < 4 and held["full"] < held["selective"] < held["none"]
    kept = {"recompute": "none"}
    assert replace(transformer(7), fused=False).kept_bytes(kept) > 1.2 * transformer(7).kept_bytes(kept)


def test_the_estimate_knows_which_layers_are_recomputed() -> None:
    """And that layers which are recomputed together are all there again at once."""
    actor, tokens = transformer(7), 32768

    def update(**keys: Any) -> int:
        return actor.update_bytes(tokens, keys)

    none, full = update(recompute="none"), update(recompute="full")
    for kind in ("selective", "full"):
        assert update(recompute=kind, recompute_layers=28) == update(recompute=kind, recompute_layers=1, recompute_method="uniform")
        few, many = (update(recompute=kind, recompute_layers=count) for count in (4, 24))
        assert update(recompute=kind) < many < few < none
    few = update(recompute="full", recompute_layers=4)
    assert 24 / 28 < few / none < 25 / 28  # four layers keep next to nothing
    together = update(recompute="full", recompute_layers=28, recompute_method="uniform")
    assert none < together < 1.05 * none and update(recompute="full", recompute_layers=4, recompute_method="uniform") < 3 * full
    where = hardware(actor=actor)
    for keys, away in (({}, False), ({"recompute_layers": 4}, True), ({"recompute_layers": 28, "recompute_method": "uniform"}, True)):
        found = settled(where, actor={"token_budget": tokens}, train={"recompute": "full", **keys}).settings["actor"]
        assert found.offload_activations == away, keys


def test_the_estimate_knows_that_layers_are_divided() -> None:
    """Members of a group gather hidden states before each block; heads, columns and logits are those of one of them, of all tokens."""
    actor, tokens, none = transformer(7, head=True), 16384, {"recompute": "none"}
    gathered = [actor.part(parts).kept_bytes(none) - actor.kept_bytes(none) for parts in (1, 2, 4)]
    hidden = 2 * actor.shape.width * (2 * len(actor.shape.layers) + 1)
    assert gathered[0] == 0 and 1 < gathered[1] / hidden < 1.1 and 3 < gathered[2] / hidden < 3.3
    whole, part = actor.head_bytes(4 * tokens, none, False), actor.part(4).head_bytes(4 * tokens, none, False)
    assert part < whole
    assert actor.part(4).update_bytes(tokens, none) >= tokens * actor.part(4).kept_bytes(none) + part
    for parts in (1, 4):
        where = replace(hardware(actor=actor.part(parts), longest=100_000), parts=parts)
        assert micro_batch_tokens(config(), where, "actor", {}, 1) == 100_000 // parts
        short = replace(where, longest=100)
        assert micro_batch_tokens(config(), short, "actor", {}, 1) == 16384 // parts, "a micro-batch is a group's, not a member's"


def test_the_layers_of_another_role_are_not_those_of_auto() -> None:
    """Recompute by `auto` takes all layers: `recompute_layers` is said of the critic's."""
    where = hardware(device_gib=24, actor=transformer(0.5), critic=transformer(0.5))
    found = settled(where, critic={"recompute": "full"}, train={"recompute_layers": 1, "recompute_method": "uniform"}).settings
    assert (found["critic"].recompute_layers, found["critic"].recompute_method) == (1, "uniform")
    assert (found["actor"].recompute, found["actor"].recompute_layers, found["actor"].recompute_method) == ("full", None, "block")


def test_the_estimate_knows_the_head() -> None:
    actor, fused = transformer(7, head=True), {"recompute": "none", "fused_head": True, "entropy_recompute": True}
    layers = transformer(7).update_bytes(16384, fused)
    assert actor.update_bytes(16384, fused) == layers  # less than a layer's gradients, and gone by then
    for keys, bonus, more in (
        ({"fused_head": False}, False, 37),
        ({"fused_head": False}, True, 46),
        ({"entropy_recompute": False}, True, 11.6),  # logits, and the gradient of half of them in bfloat16
    ):
        found = actor.update_bytes(16384, {**fused, **keys}, entropy_gradient=bonus) - 16384 * actor.kept_bytes(fused)
        assert more - 1 < found / GIB < more + 1
    where = hardware(actor=actor)
    assert settled(where).settings["actor"].recompute == "none"
    plain = {"train": {"fused_head": False}, "actor": {"token_budget": 16384}}
    assert settled(where, **plain).settings["actor"].recompute == "selective"
    bonus = {"algorithm": {"entropy_coef": 0.01}, "actor": {"token_budget": 19000}}
    assert settled(where, **bonus).settings["actor"].recompute == "none"
    assert settled(where, **bonus, train={"entropy_recompute": False}).settings["actor"].recompute == "selective"


def test_logits_are_kept_where_they_fit_beside_all_else() -> None:
    where = hardware(actor=transformer(1.5, head=True))
    found = settled(where)
    assert not found.settings["actor"].head_recompute
    assert found.words == ("actor: logits kept until the backward pass (auto: they fit)",)
    for sections in (
        {"train": {"head_recompute": True}},
        {"train": {"fused_head": False}},
        {"train": {"recompute": "full"}},
        {"train": {"offload_activations": True}},
        {"actor": {"token_budget": 50_000}},  # 28 GiB of logits beside 70 of activations
    ):
        assert settled(where, **sections).settings["actor"].head_recompute, sections
    assert not settled(where, train={"head_recompute": False, "recompute": "full"}).settings["actor"].head_recompute
    assert settled(replace(where, device="cpu")).settings["actor"].head_recompute  # bounded memory, as before
    assert settled(hardware(device_gib=40, actor=where.roles["actor"])).settings["actor"].head_recompute


def test_a_device_that_would_be_full_to_the_brim_recomputes() -> None:
    """7B with a reference on a device of 140 GiB: parameters, gradients and activations fit, but not with a layer's gradients and the
    optimizer's slots."""
    where, given = hardware(device_gib=139.8, actor=transformer(7.6156), ref=transformer(7.6156, learns=False)), {"token_budget": 16384}
    found = settled(where, actor=given).settings
    assert found["actor"].offload_optimizer and found["actor"].recompute == "selective" and not found["ref"].offload_params
    assert settled(replace(where, roles={"actor": where.roles["actor"]}), actor=given).settings["actor"].recompute == "none"


def test_activations_that_are_offloaded_anyway_are_not_recomputed_by_auto() -> None:
    small = hardware(device_gib=24, actor=transformer(0.5))
    assert settled(small).settings["actor"].recompute != "none"
    found = settled(small, train={"offload_activations": True}).settings["actor"]
    assert found.offload_activations and found.recompute == "none"
    assert settled(small, train={"recompute": "none"}).settings["actor"].offload_activations


def test_activations_that_the_user_sends_away_fit_the_host() -> None:
    """7B, 16,384 tokens: 85.1 GiB of optimizer are there, about 72 GiB of activations without recompute, 46 or 3 with it."""
    away = {"offload_activations": True}
    for host, kind in ((190, "none"), (160, "selective"), (120, "full")):
        found = settled(hardware(host_gib=host, actor=transformer(7.6156)), train=away)
        assert found.settings["actor"].recompute == kind and found.settings["actor"].offload_activations
        assert ("would hold about 71.8 GiB in an update, and " in found.words[0]) == (kind != "none")
    with pytest.raises(
        UserError, match=r"the actor's activations \(71\.\d GiB\) and weights .* \(14\.2 GiB\) do not fit .* Lower actor.token"
    ):
        settled(hardware(host_gib=160, actor=transformer(7.6156)), train={**away, "recompute": "none"})
    small = {"actor": transformer(0.5), "critic": transformer(0.5)}  # each has pages of its own: 72 and 143 GiB
    for host, fits in ((225, True), (210, False)):
        with contextlib.nullcontext() if fits else pytest.raises(UserError, match=r"actor's activations .* and the critic's activations"):
            settled(hardware(host_gib=host, **small), train={**away, "recompute": "none"})


def test_words_say_what_auto_saw() -> None:
    (words,) = settled(hardware(device_gib=24, actor=transformer(0.5))).words
    assert words.startswith("actor: full recompute (auto: 16384 tokens would take about ")
    assert "in an update, and " in words and words.endswith("GiB are left)")


H200 = 139.8


def of_shape(name: str, *, learns: bool = True, critic: bool = False) -> RoleFacts:
    return RoleFacts.of_shape(Shape.named(name), config(), "cuda", learns=learns, role="critic" if critic else "actor")


def budgets_of(where: Facts, **sections: dict[str, Any]) -> Budgets:
    measured = replace(where, free_bytes=40 * GIB, kv_bytes_per_token=10_000, longest=300)
    return make_plan(config(run={"steps": 1}, **sections), measured).budgets


@pytest.mark.parametrize(
    ("shape", "device_gib", "budget"),
    [
        ("135M", H200, 65536),
        ("135M", 80, 32768),  # 65536 would take more than half of it
        ("135M", 24, 16384),
        ("0.5B", H200, 32768),
        ("0.5B", 80, 16384),
        ("1.5B", H200, 16384),  # busy with as many
    ],
)
def test_small_models_get_larger_micro_batches_where_they_fit(shape: str, device_gib: float, budget: int) -> None:
    where = hardware(device_gib=device_gib, actor=of_shape(shape))
    found = settled(where)
    assert found.budgets == {"actor": budget} and found.settings["actor"].recompute == "none"
    budgets = budgets_of(where)
    assert (budgets.token_budget, budgets.forward_token_budget, budgets.ref_token_budget) == (budget, 2 * budget, 2 * budget)
    assert budgets.reward_model_token_budget == 65536  # whose size is its own
    assert budgets_of(where, ref={"path": "larger"}).ref_token_budget == 32768
    given = budgets_of(where, actor={"token_budget": 1000})
    assert (given.token_budget, given.critic_token_budget, given.reward_model_token_budget) == (1000, 2000, 4000)


def test_a_larger_micro_batch_is_judged_by_what_the_user_keeps_of_it() -> None:
    small = {"actor": of_shape("135M")}
    assert settled(hardware(device_gib=24, **small), train={"recompute": "full"}).budgets == {"actor": 65536}
    assert settled(hardware(device_gib=80, **small), rollout={"release_memory": False}).budgets == {"actor": 16384}
    # What goes to the host has to fit there, and 65536 tokens would not.
    by_hand = settled(hardware(device_gib=H200, host_gib=24, **small), train={"offload_activations": True, "recompute": "none"})
    assert by_hand.budgets == {"actor": 16384}
    assert settled(hardware(device_gib=H200, actor=replace(of_shape("135M"), trained=0))).budgets == {}


@pytest.mark.parametrize(("critic", "budget"), [("135M", 65536), ("0.5B", 32768), ("1.5B", 32768)])
def test_a_critic_has_a_budget_by_its_own_size(critic: str, budget: int) -> None:
    where = hardware(device_gib=H200, actor=of_shape("135M"), critic=of_shape(critic, critic=True))
    found = settled(where)
    assert found.budgets["critic"] == budget == budgets_of(where).critic_token_budget
    assert found.settings["critic"].recompute == "none" and found.settings["actor"].recompute == "none"


@pytest.mark.parametrize(("began", "now"), [("full", "auto"), ("full", "selective"), ("auto", "auto")])
def test_a_resumed_run_is_settled_for_the_budget_that_it_keeps(began: str, now: str) -> None:
    """On a smaller device, or with less recompute, `auto` would choose fewer tokens now; the run goes on with those that it began with."""
    before = settled(hardware(device_gib=24 if began == "full" else H200, actor=of_shape("135M")), train={"recompute": began})
    assert before.budgets == {"actor": 65536}
    where = hardware(device_gib=24, actor=of_shape("135M"))
    found = plan_roles(config(train={"recompute": now}), where, {"token_budget": 65536, "critic_token_budget": 131072})
    assert found.budgets == {"actor": 65536}
    own = found.settings["actor"]
    assert own.recompute == ("full" if now == "auto" else "selective") and (own.offload_activations or own.recompute == "full")
    # One that began with an earlier version's 16384 keeps them, and is not refused for more.
    away = config(train={"recompute": "none", "offload_activations": True})
    assert plan_roles(away, replace(where, host_bytes=12 * GIB), {"token_budget": 16384}).budgets == {"actor": 16384}


def test_the_largest_micro_batch_counts() -> None:
    where = hardware(longest=5000)
    assert micro_batch_tokens(config(), where, "actor", {}, 1) == 16384 and micro_batch_tokens(config(), where, "critic", {}, 1) == 32768
    assert (
        micro_batch_tokens(config(actor={"token_budget": 1000}), where, "actor", {"actor": 9000}, 1) == 5000
    )  # a longer sample has one alone
    fixed = config(actor={"dynamic_batch": False, "micro_batch": 3}, critic={"token_budget": 7000})
    assert micro_batch_tokens(fixed, where, "actor", {}, 4) == 3750, "four workers have a quarter each"
    assert micro_batch_tokens(fixed, where, "actor", {}, 1) == 15000 and micro_batch_tokens(fixed, where, "critic", {}, 1) == 7000


def test_a_cache_that_stays_leaves_less_for_activations() -> None:
    where = hardware(device_gib=100, actor=transformer(0.5))
    assert settled(where).settings["actor"].recompute == "none"
    assert settled(where, rollout={"release_memory": False}).settings["actor"].recompute != "none"


def test_a_cache_that_stays_leaves_room_for_what_comes_back() -> None:
    where = hardware(actor=transformer(1), critic=transformer(2), ref=transformer(3, learns=False))
    # What comes back is the critic: the actor is there in a rollout.
    away = {"actor": RoleSettings(offload_params=True, offload_grads=True), "critic": RoleSettings(offload_params=True, offload_grads=True)}
    assert returning(where, {**away, "ref": RoleSettings(offload_params=True)}) == pytest.approx(12e9)
    assert returning(where, {**away, "critic": RoleSettings(), "ref": RoleSettings()}) == pytest.approx(4e9)
    roles = {"actor": plans.SMALL, "ref": replace(plans.SMALL, parameter_bytes=60 * GIB), "critic": replace(plans.SMALL, trained=1)}
    for release, gib in ((True, 85), (False, 20)):
        cached = config(
            rollout={"release_memory": release, "max_new_tokens": 4096, "block_tokens": 1024, "max_seqs": 1000},
            ref={"offload_params": True},
        )
        facts = plans.facts(free_bytes=100 * GIB, kv_bytes_per_token=1 << 20, longest=8, roles=roles)
        assert make_plan(cached, facts).budgets.kv_blocks == gib


def test_a_pass_over_prompts_has_room_beside_the_cache() -> None:
    """`auto` makes it smaller where memory is short. A number that the user gives is taken, and the cache is what is left then."""
    shape, lora = Shape.named("7B"), {"lora": {"rank": 16}}
    where = {"device": "cuda", "device_bytes": 24 * GIB, "host_bytes": 1000 * GIB, "longest": 512}

    def plan(free: int, **rollout: Any) -> Budgets:
        return plan_of(shape, config(**lora, rollout={"max_seqs": 1024, **rollout}), **where, free_bytes=free).budgets  # type: ignore[arg-type]

    def cache(budgets: Budgets) -> int:
        return budgets.kv_blocks * 16 * shape.kv_bytes_per_token(2)

    actor = RoleFacts.of_shape(shape, config(**lora), "cuda", learns=True)
    decode = decode_bytes(config(rollout={"max_seqs": 1024}), Facts("cuda", 0, 0, {"actor": actor}, 512, 1), 1024)
    taken = {tokens: prefill_bytes(shape, tokens, 2, fused=True) for tokens in (2048, 8192, 16384)}
    for free, tokens in ((80 * GIB, 16384), (8 * GIB, 8192), (3 * GIB, 2048)):
        found = plan(free)
        assert found.max_batched_tokens == tokens and cache(found) + taken[tokens] + decode <= free
    by_hand = plan(8 * GIB, max_batched_tokens=16384)
    assert by_hand.max_batched_tokens == 16384 and cache(by_hand) < cache(plan(8 * GIB))
    assert plan(8 * GIB, kv_bytes=5 * GIB).max_batched_tokens < 16384 == plan(16 * GIB, kv_bytes=5 * GIB).max_batched_tokens
    on_cpu = {**where, "device": "cpu", "device_bytes": 0, "host_bytes": 2 * GIB}
    given = config(rollout={"kv_bytes": 2 * GIB - 1})  # what is free on a CPU is a guess
    assert plan_of(Shape.named("small"), given, **on_cpu).budgets.max_batched_tokens == 4096  # type: ignore[arg-type]


def test_a_token_budget_that_cannot_fit_is_halved() -> None:
    """Even full recompute and offload of activations would not make it fit. A longer sample has a micro-batch alone in any case."""
    where = hardware(
        device_gib=20, longest=512, actor=RoleFacts.of_shape(Shape.named("7B"), config(lora={"rank": 16}), "cuda", learns=True)
    )
    assert settled(where).budgets == {"actor": 8192} and settled(where).settings["actor"].offload_activations
    assert settled(replace(where, device_bytes=24 * GIB)).budgets == {"actor": 16384}
    assert settled(replace(where, longest=16384)).budgets == {"actor": 16384}
    words = make_plan(config(), replace(where, free_bytes=2 * GIB)).words
    assert any("micro-batches of at most 8192 tokens (auto: more would not fit into the device's memory)" in text for text in words)
    # What a resumed run keeps was not chosen for the device that it is on now.
    larger = replace(where, free_bytes=2 * GIB, device_bytes=24 * GIB)
    words = make_plan(config(), larger, {"token_budget": 8192}).words
    assert any("at most 8192 tokens (auto: as in the checkpoint that the run resumes from)" in text for text in words)


def test_a_token_budget_whose_activations_would_not_fit_the_host_is_halved() -> None:
    """With 16384 tokens the activations of full recompute, 2.7 GiB, would leave the device; there is too little main memory for them."""
    lora = RoleFacts.of_shape(Shape.named("7B"), config(lora={"rank": 16}), "cuda", learns=True)
    where = hardware(device_gib=22, longest=512, actor=lora)
    ample = settled(where)
    assert ample.budgets == {"actor": 16384} and ample.settings["actor"].offload_activations
    exported = lora.parameter_bytes
    short = settled(replace(where, host_bytes=exported + GIB))
    own, tokens = short.settings["actor"], short.budgets["actor"]
    assert tokens < 16384 and own.offload_activations * tokens * lora.kept_bytes(vars(own)) <= GIB
    # A budget that was set by hand is not changed, but refused.
    with pytest.raises(UserError, match=r"offload: the actor's activations .* do not fit into the host's memory"):
        settled(replace(where, host_bytes=exported + GIB), actor={"token_budget": 16384})


def test_one_worker_of_a_machine_has_the_whole_actor_in_main_memory_for_a_checkpoint() -> None:
    """`host_bytes` is one worker's share: eight workers need the weights on their way into a checkpoint once, not eight times."""
    alone = hardware(device_gib=80, host_gib=80, actor=transformer(7))
    with pytest.raises(UserError, match=r"weights on their way into a checkpoint \(13.0 GiB\) do not fit"):
        settled(alone)
    assert settled(replace(alone, beside=8)).settings["actor"].offload_optimizer
    with pytest.raises(UserError, match=r"weights on their way into a checkpoint \(1.6 GiB\) do not fit"):
        settled(replace(alone, beside=8, host_bytes=79 * GIB))


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"offload: the actor's optimizer \(78.2 GiB\) and weights on their way into a checkpoint \(13.0 GiB\) do not fit into the "
        "host's memory, of which 91.0 GiB",
    ):
        settled(hardware(device_gib=80, host_gib=91, actor=transformer(7)))
    assert settled(hardware(device_gib=80, host_gib=92, actor=transformer(7))).settings["actor"].offload_optimizer
    settled(hardware(host_gib=0))  # nothing is moved


# -- lengths ----------------------------------------------------------------------------------------------------------------------------


def test_the_remedy_for_a_short_context_helps() -> None:
    """What is told to be lowered makes the longest sample fit; what cannot help is not told."""
    for longest, told in (
        (20, "Lower rollout.max_new_tokens to at most 12, or set data.max_prompt_tokens = 16"),
        (83, "Set data.max_prompt"),
    ):
        with pytest.raises(UserError, match=told):
            check_context(config(rollout={"max_new_tokens": 16}), longest, 32, rollout=True)
    with pytest.raises(UserError, match=r"Lower rollout.max_new_tokens to at most 12$"):
        check_context(config(rollout={"max_new_tokens": 40}), 20, 32, rollout=True)
    check_context(config(rollout={"max_new_tokens": 12}), 20, 32, rollout=True)


def test_a_prompt_that_each_sample_reads_anew_needs_room_for_each() -> None:
    where: dict[str, Any] = {"device": "cuda", "device_bytes": 24 * GIB, "host_bytes": 1000 * GIB, "longest": 512, "free_bytes": 8 * GIB}

    def blocks(samples: int, *, shared: bool) -> int:
        algorithm = {"prompts_per_step": 16 // samples, "samples_per_prompt": samples}
        given = config(lora={"rank": 16}, algorithm=algorithm, rollout={"max_seqs": 1024, "prefix_sharing": shared})
        return plan_of(Shape.named("7B"), given, **where).budgets.kv_blocks

    assert blocks(8, shared=False) == blocks(1, shared=False) == blocks(1, shared=True) < blocks(8, shared=True)


def test_a_budget_below_the_longest_sample_is_said_to_be_passed() -> None:
    facts = plans.facts("cpu", 100 * GIB, kv_bytes_per_token=1 << 10, longest=100)
    for budget, said in ((99, True), (356, False)):
        words = " ".join(make_plan(config(actor={"token_budget": budget}), facts).words)
        assert ("a longer sample (up to 356 tokens) runs alone" in words) == said


# -- a resume ---------------------------------------------------------------------------------------------------------------------------


def test_a_cache_that_no_longer_fits_is_planned_anew_and_that_is_said() -> None:
    """The run began with the optimizer on the host. On a CPU what is free is a guess; what the user set is refused elsewhere."""
    keys = {"max_new_tokens": 4096, "block_tokens": 1024, "max_seqs": 1000}
    begun = plans.facts(free_bytes=100 * GIB, kv_bytes_per_token=1 << 20, longest=8)
    now, kept = replace(begun, free_bytes=40 * GIB), {"kv_blocks": 85}

    def plan(facts: Facts, given: dict[str, int] | None = None, **more: Any) -> Plan:
        return make_plan(config(rollout={**keys, **more}, ref={"offload_params": True}), facts, given)

    assert plan(begun).budgets.kv_blocks == plan(replace(begun, free_bytes=86 * GIB), kept).budgets.kv_blocks == 85
    found = plan(now, kept)
    assert found.budgets.kv_blocks == plan(now).budgets.kv_blocks == 34
    assert found.words[-1].startswith("the KV cache of 85.0 GiB that the run began with does not fit into the 40.0 GiB that are free now")
    assert plan(replace(now, device="cpu"), kept).budgets.kv_blocks == 85
    assert not any("began with" in words for given in (plan(begun, kept), plan(now)) for words in given.words)
    roles = {"actor": replace(plans.SMALL, trained=1), "ref": replace(plans.SMALL, parameter_bytes=10 * GIB)}
    stays = replace(begun, free_bytes=90 * GIB, roles=roles)
    assert [plan(stays, kept, release_memory=release).budgets.kv_blocks for release in (True, False)] == [85, 40]


# -- graphs -----------------------------------------------------------------------------------------------------------------------------


def test_graphs_give_way_to_parameters_that_leave() -> None:
    away = config(train={"offload_params": True})
    assert uses_graphs(config(), "cuda") and not uses_graphs(away, "cuda")
    learning = plans.facts(roles={"actor": replace(plans.SMALL, trained=1)})
    assert graphs_in_words(away, learning, 0, 8) == "no CUDA graphs: train.offload_params moves the weights that they would read"
    assert graphs_in_words(away, plans.facts(), 0, 8).startswith("CUDA graphs of"), "an evaluation moves nothing"
    demanded = config(train={"offload_params": True, "shard": "full"}, rollout={"cuda_graphs": True})
    with pytest.raises(UserError, match=r"cuda_graphs: true, but train.offload_params moves the weights"):  # one worker shares nothing out
        make_plan(demanded, learning)


def test_graphs_read_a_copy_that_stays_while_parameters_leave() -> None:
    for way, copied in ((Division(1, 1, 2), True), (Division(2, 1, 1), True), (Division(1, 4, 1), True), (Division(2, 1, 2), False)):
        given = config(train={"offload_params": True, "shard": "optimizer"})
        facts = divided(given, to_divide("Qwen3-30B-A3B", 8, 141, given, ("actor",)), way)
        assert facts.samples_from_copy == copied
        assert graphs_in_words(given, facts, 0, 8).startswith("CUDA graphs of" if copied else "no CUDA graphs: train.offload_params")


# -- published configurations, and plans without models ----------------------------------------------------------------------------------

OFF = {"offload_optimizer": True, "offload_grads": True}
KEPT_LOGITS = {"head_recompute": False}
# What `auto` chose when activations were estimated with rounder numbers: roles with a model of their own -> keys of actor and critic.
CHOSEN: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {
    ("actor",): {"0.5B": [KEPT_LOGITS], "1.5B": [KEPT_LOGITS], "7B": [OFF | KEPT_LOGITS]},
    ("actor", "ref"): {"0.5B": [KEPT_LOGITS], "1.5B": [KEPT_LOGITS], "7B": [OFF | {"recompute": "selective"}]},
    ("actor", "critic", "ref"): {
        "0.5B": [KEPT_LOGITS, {}],
        "1.5B": [KEPT_LOGITS, {}],
        "7B": [OFF | {"recompute": "selective"}, OFF | {"recompute": "full"}],
    },
}
TOKENS = {"0.5B": 32768, "1.5B": 16384, "7B": 16384}
BLOCKS = {"0.5B": 99328, "1.5B": 99328, "7B": 57880}
DECODING = {"0.5B": 1328365568, "1.5B": 1502937088, "7B": 1947140096}


@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("roles", CHOSEN, ids="+".join)
def test_published_configurations_run_as_they_did(shape: str, roles: tuple[str, ...]) -> None:
    """On an H200, with 60 GiB measured free."""
    given = config(run={"steps": 1}, rollout={"max_new_tokens": 1024}, algorithm={"prompts_per_step": 128, "samples_per_prompt": 8})
    facts = {"device": "cuda", "device_bytes": int(H200 * GIB), "host_bytes": 1000 * GIB, "longest": 512, "roles": roles}
    plan = plan_of(Shape.named(shape), given, **facts, free_bytes=60 * GIB, cores=16)  # type: ignore[arg-type]
    chosen = [RoleSettings(**keys) for keys in CHOSEN[roles][shape]]
    assert [plan.roles[role] for role in ("actor", "critic") if role in roles] == chosen and plan.roles["ref"] == RoleSettings()
    tokens = TOKENS[shape]
    assert plan.budgets == Budgets(
        threads=16, kv_blocks=BLOCKS[shape], max_seqs=1024, max_batched_tokens=16384, token_budget=tokens, forward_token_budget=2 * tokens,
        ref_token_budget=2 * tokens, critic_token_budget=32768, critic_forward_token_budget=65536, reward_model_token_budget=65536,
    )  # fmt: skip
    actor = {"actor": RoleFacts.of_shape(Shape.named(shape), given, "cuda", learns=True)}
    assert decode_bytes(given, Facts("cuda", 0, 0, actor, 512, 1), 1024) == DECODING[shape]
    eager = decode_bytes(given, Facts("cuda", 0, 0, actor, 512, 1, not_captured="its group exchanges numbers through the host"), 1024)
    assert DECODING[shape] - eager == footprint.GRAPH_BYTES * 2 * len(footprint.sizes_up_to(1024))


def test_more_than_the_memory_can_hold_is_refused_by_the_key_that_asks_for_it() -> None:
    cpu = {"device": "cpu", "device_bytes": 0, "host_bytes": 16 * GIB, "longest": 8}
    for sections, refused in (
        (
            {"algorithm": {"prompts_per_step": 10**6, "samples_per_prompt": 64}},
            r"^algorithm\.samples_per_prompt: a step of 64000000 ",
        ),
        (
            {"rollout": {"max_seqs": 2**31 - 1}},
            r"^rollout\.max_seqs: decoding 2147483647 samples at once takes .* are free\. Use less",
        ),
        ({"rollout": {"kv_bytes": 10**15}}, r"^rollout\.kv_bytes: 1000000000000000 makes a KV cache of 909\.5 TiB, .* Lower it"),
        ({"rollout": {"block_tokens": 2**31 - 1}}, r"the KV cache: .* or lower rollout\.block_tokens$"),
    ):
        with pytest.raises(UserError, match=refused):
            plan_of(Shape.named("small"), config(**sections), **cpu)  # type: ignore[arg-type]


def test_free_memory_is_predicted_where_it_is_not_measured() -> None:
    facts = {"device": "cuda", "device_bytes": 80 * GIB, "host_bytes": 1000 * GIB, "longest": 512}
    shape = Shape.named("1.5B")
    taken = 18 * sum(shape.parameters_by_kind().values())  # parameters, gradients, masters and moments
    free = int(80 * GIB * 15 / 16) - taken
    given = config(rollout={"max_seqs": 4096})
    predicted, measured = plan_of(shape, given, **facts), plan_of(shape, given, **facts, free_bytes=free)
    assert (
        predicted == measured and 0 < predicted.budgets.kv_blocks < plan_of(shape, given, **facts, free_bytes=free + GIB).budgets.kv_blocks
    )
    on_cpu = plan_of(shape, config(), device="cpu", device_bytes=0, host_bytes=10 * GIB, longest=512, cores=4)
    assert on_cpu.budgets.threads == 4 and on_cpu.budgets.token_budget == 8192
    lora = plan_of(Shape.named("7B"), config(lora={"rank": 16}), **facts)
    assert not lora.roles["actor"].offload_optimizer  # few numbers learn
    with pytest.raises(UserError, match=r"the structure of strange is not known"):
        plan_of({**vars_of(shape), "model_type": "strange"}, config(), **facts)


def vars_of(shape: Shape) -> dict[str, Any]:
    return {"hidden_size": shape.width, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": shape.vocabulary}


# -- what workers share out -------------------------------------------------------------------------------------------------------------


def shared_out(shape: str, workers: int, beside: int = 8, *, rollout: bool = True, only: str | None = None, **sections: Any) -> Sharding:
    """On machines with eight H200."""
    given = config(**sections)
    actor = RoleFacts.of_shape(Shape.named(shape), given, "cuda", learns=True)
    facts = Facts("cuda", 140 * GIB, 1000 * GIB, {"actor": actor}, 512, 1, rollout=rollout, sharding=Sharding(workers=workers))
    return choose_sharding(given, facts, min(beside, workers), only=only)


@pytest.mark.parametrize(
    ("shape", "workers", "rollout", "shard", "group"),
    [
        ("7B", 1, True, "optimizer", 1),
        ("7B", 8, True, "optimizer", 8),
        ("7B", 64, True, "optimizer", 64),
        ("32B", 8, False, "full", 8),
        ("32B", 64, False, "hybrid", 8),  # in each machine
        ("32B", 64, True, "full", 64),  # with a whole copy for rollouts, a machine's share is too much
        ("70B", 64, False, "full", 64),  # no device has it whole, also while it is loaded
    ],
)
def test_auto_shares_out_the_optimizer_where_it_fits_and_else_parameters(
    shape: str, workers: int, rollout: bool, shard: str, group: int
) -> None:
    found = shared_out(shape, workers, rollout=rollout)
    assert (found.shard, found.workers, found.group) == (shard, workers, group)


def test_auto_says_why() -> None:
    assert shared_out("7B", 1).why == ""
    assert re.fullmatch(r"parameters, gradients and optimizer would take [\d.]+ GiB of each device's 140.0 GiB", shared_out("7B", 8).why)
    larger = shared_out("32B", 64)
    assert re.fullmatch(r'parameters, gradients and optimizer would take 18[\d.]+ GiB of .* 140.0 GiB with "optimizer"', larger.why)
    facts = {"device": "cuda", "device_bytes": 140 * GIB, "host_bytes": 1000 * GIB, "longest": 512}
    plan = plan_of(Shape.named("32B"), config(), **facts, sharding=larger)  # type: ignore[arg-type]
    (words,) = [text for text in plan.words if "sharding" in text]
    assert words.startswith("full sharding: 64 workers share out parameters, gradients, master weights and moments (auto: parameters, ")
    assert re.search(r"\); each holds \d+\.\d GiB in an update, and \d+\.\d GiB while the actor is loaded$", words)


def test_auto_stays_with_the_optimizer_where_more_is_not_possible() -> None:
    found = shared_out("70B", 64, only="train.compile is set")
    assert (found.shard, found.why) == ("optimizer", "train.compile is set")
    assert shared_out("70B", 64, lora={"rank": 16}).shard == "optimizer"  # few numbers learn: shards would come on top of the whole model
    cpu = Facts("cpu", 0, GIB, {}, 512, 1, sharding=Sharding(workers=4))
    assert choose_sharding(config(), cpu, 4) == Sharding("optimizer", 4, 4)


def several(workers: int, sharding: Sharding | None = None, *, gib: int = 140, **shapes: str) -> Facts:
    """Roles of these shapes on several workers; the actor is trained with adapters."""
    given = config(lora={"rank": 16})
    roles = {
        role: RoleFacts.of_shape(Shape.named(shape), given, "cuda", learns=role == "actor", role=role) for role, shape in shapes.items()
    }
    return Facts("cuda", gib * GIB, 1000 * GIB, roles, 512, 1, sharding=sharding or Sharding(workers=workers))


def test_auto_shares_out_parameters_where_all_roles_cannot_be_loaded_whole() -> None:
    """Once they were there, the reference and the reward model could wait on the host."""
    facts = several(8, actor="7B", ref="32B", reward_model="32B")
    whole = sum(model.parameter_bytes for model in facts.roles.values())
    assert sum(loading_order(replace(facts, sharding=Sharding("optimizer", 8, 8))).values()) > whole
    assert most_while_loading(replace(facts, sharding=Sharding("optimizer", 8, 8)))[1] == whole > (1 - SLACK) * facts.device_bytes
    found = choose_sharding(config(lora={"rank": 16}), facts, 8)
    assert found.shard == "full" and 'with "optimizer"' in found.why
    held, fits = {role: model.held(found).parameters for role, model in facts.roles.items()}, replace(facts, sharding=found)
    peaks = loading_order(fits)
    assert list(peaks) == ["ref", "reward_model", "actor"]
    assert held["ref"] + held["reward_model"] < peaks["reward_model"] < facts.roles["reward_model"].parameter_bytes  # rows, and a pass
    assert peaks["actor"] > held["ref"] + held["reward_model"] + facts.actor.parameter_bytes
    check_loading(fits)


def test_roles_that_cannot_be_loaded_are_refused() -> None:
    whole = several(8, Sharding("optimizer", 8, 8), actor="7B", ref="70B")
    with pytest.raises(UserError, match=r'with "optimizer", loading the .* would take .* train.shard = "full" \(each'):
        check_loading(whole)
    check_loading(replace(whole, sharding=Sharding("full", 8, 8)))
    check_loading(several(8, Sharding("full", 8, 8), gib=40, actor="7B", ref="70B"))  # each worker reads its rows alone
    with pytest.raises(
        UserError, match=r'"full", loading the ref would take 2.* 20.0 GiB: 2.* its part of the ref, .* Use a smaller model$'
    ):
        check_loading(several(8, Sharding("full", 8, 8), gib=20, ref="70B"))
    crowded = several(2, Sharding("full", 2, 2), gib=100, actor="32B", ref="32B", reward_model="32B")
    said = (
        r"loading the actor .* there of ref and reward_model\. Use .* rollout\.tensor_parallel \(.* of its own for ref or reward_model \("
    )
    with pytest.raises(UserError, match=said):
        check_loading(crowded)
    in_parts = replace(crowded, copy_bytes=crowded.actor.parameter_bytes // 8, rollout_parts=8)  # of which the engine has one, too
    assert most_while_loading(in_parts)[1] < 104 * GIB < 138 * GIB < most_while_loading(crowded)[1]
    check_loading(replace(whole, sharding=UNSHARDED))  # one worker: its plan is made when all are loaded
    facts = {"device": "cuda", "device_bytes": 31 * GIB // 2, "host_bytes": 1000 * GIB, "longest": 512, "rollout": False}
    with pytest.raises(UserError, match=r"Use a smaller model or train.fused_layers = false \("):
        plan_of(Shape.named("70B"), config(), **facts, sharding=Sharding("full", 64, 64))  # type: ignore[arg-type]


def test_layers_that_are_divided_are_loaded_in_parts() -> None:
    """A model of 131 GiB on devices of 80."""
    whole = several(2, actor="70B")
    own = replace(whole, device_bytes=80 * GIB, parts=2, rollout_parts=2, sharding=UNSHARDED, roles={"actor": whole.actor.part(2)})
    assert most_while_loading(own) == ("actor", own.actor.parameter_bytes) and own.actor.parameter_bytes < 80 * GIB
    check_loading(own)
    alone = replace(own, rollout_parts=1, copy_bytes=whole.actor.parameter_bytes)
    with pytest.raises(
        UserError, match=r"^train.tensor_parallel: with layers in 2 parts, .* Use a smaller model or rollout.tensor_parallel \("
    ):
        check_loading(alone)
    with pytest.raises(UserError, match=r"loading the actor would take 66"):
        check_loading(replace(own, device_bytes=40 * GIB))


def test_experts_that_are_divided_are_loaded_in_parts() -> None:
    whole = RoleFacts.of_shape(Shape.named("Qwen3-30B-A3B"), config(), "cuda", learns=True)
    own = whole.with_experts(8)
    assert whole.parameter_bytes > 50 * GIB and own.parameter_bytes < whole.parameter_bytes / 5 and own.trained * 2 == own.parameter_bytes
    assert whole.with_experts(1) == whole


def test_shards_that_are_away_are_counted_on_the_host_and_not_on_the_device() -> None:
    facts = several(8, Sharding("full", 8, 8), actor="7B", ref="7B")
    held = {role: model.held(facts.sharding).parameters for role, model in facts.roles.items()}
    here = given_decisions(config(train={"offload_params": False}, ref={"offload_params": False}), facts)
    away = given_decisions(config(train={"offload_params": True}, ref={"offload_params": True}), facts)
    assert resident(here.keys, facts, "actor") - resident(away.keys, facts, "actor") == held["ref"]
    assert resident(here.keys, facts, None) - resident(away.keys, facts, None) == held["ref"] + held["actor"]  # a rollout reads a copy
    found = on_host(config(), facts, away, {})
    assert (found["the actor's parameters"], found["the ref's parameters"]) == (held["actor"], held["ref"])
    assert uses_graphs(config(train={"offload_params": True, "shard": "full"}), "cuda", copied=facts.samples_from_copy)


def test_what_is_given_is_taken() -> None:
    assert shared_out("7B", 8, train={"shard": "full", "reshard_after_forward": False}) == Sharding("full", 8, 8, reshard=False)
    assert shared_out("7B", 8, train={"shard": "hybrid", "shard_size": 2}) == Sharding("hybrid", 8, 2)
    assert shared_out("70B", 8, train={"shard": "optimizer"}) == Sharding("optimizer", 8, 8)


def test_offloads_are_decided_by_what_a_worker_holds() -> None:
    """A 7B model whose optimizer one device would have to send away."""
    facts = {"device": "cuda", "device_bytes": 140 * GIB, "host_bytes": 1000 * GIB, "longest": 512}

    def settings(sharding: Sharding) -> RoleSettings:
        return plan_of(Shape.named("7B"), config(), **facts, sharding=sharding).roles["actor"]  # type: ignore[arg-type]

    assert settings(UNSHARDED).offload_optimizer and not settings(Sharding("optimizer", 8, 8)).offload_optimizer
    full = settings(Sharding("full", 8, 8))
    assert not full.offload_optimizer and not full.offload_params and not full.offload_activations


# -- among how many workers models are divided ------------------------------------------------------------------------------------------

QWEN_72B = QWEN2 | {
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
OLMO = {"model_type": "olmo2", "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40}
OLMO |= {"num_key_value_heads": 40, "vocab_size": 100352, "tie_word_embeddings": False}
LONG_RESPONSES = {"rollout": {"max_new_tokens": 8192}}
OPTIMIZER = {"train": {"shard": "optimizer"}}


def to_divide(shape: str | dict[str, Any], workers: int, gb: int, given: Config, roles: tuple[str, ...], *, rollout: bool = True) -> Facts:
    found = Shape.named(shape) if isinstance(shape, str) else Shape.from_config(shape)
    models = {role: RoleFacts.of_shape(found, given, "cuda", learns=role in ("actor", "critic"), role=role) for role in roles}
    return Facts("cuda", gb * 10**9, 0, models, 1024, 1, rollout=rollout, sharding=Sharding(workers=workers))


# The model, how many devices, GB of each; settings; tensor, expert and rollout sizes, how parameters are shared out, and what is said.
DIVISIONS: dict[str, tuple[str | dict[str, Any], int, int, dict[str, Any], tuple[int, int, int, str], str]] = {
    "7B fits whole on each": ("7B", 8, 80, LONG_RESPONSES, (1, 1, 1, "optimizer"), r"tensor_parallel = 1 \(auto: the run fits, with 6\d"),
    "7B and long contexts: fewer replicas, each with a larger cache": (
        "7B", 8, 80, {"rollout": {"max_new_tokens": 65536}}, (1, 1, 2, "full"),
        r"rollout.tensor_parallel = 2 \(auto: with fewer, models, optimizer and a KV cache for 16 samples of 66560 tokens would take 1\d\d",
    ),
    "32B: shards fit, a whole copy for rollouts does not": (
        "32B", 8, 141, LONG_RESPONSES, (1, 1, 2, "full"),
        r"rollout.tensor_parallel = 2 \(auto: with fewer, parameters, gradients, optimizer and the engine's copy would take 1\d\d",
    ),
    "32B on smaller devices": ("32B", 16, 80, LONG_RESPONSES, (1, 1, 4, "full"), r"rollout.tensor_parallel = 4 \(auto: with fewer"),
    "72B on eight machines": (QWEN_72B, 64, 141, LONG_RESPONSES, (1, 1, 2, "full"), r"rollout.tensor_parallel = 2 \(auto: with fewer"),
    "32B, nothing sampled": ("32B", 8, 80, {"algorithm": {"name": "sft"}}, (1, 1, 1, "full"), r"^train.tensor_parallel = 1 \(auto"),
    "7B, parameters not to be shared out": (
        "7B", 8, 40, OPTIMIZER, (2, 1, 2, "optimizer"), r"train.tensor_parallel = 2 \(auto: with fewer, parameters, .* would take 46.9 GiB",
    ),
    "32B, parameters not to be shared out: the engine reads them": (
        "32B", 8, 80, OPTIMIZER, (4, 1, 4, "optimizer"), r"rollout.tensor_parallel = 4 \(auto: the engine reads the parameters that learn",
    ),
    "30B-A3B: shards fit": ("Qwen3-30B-A3B", 8, 80, LONG_RESPONSES, (1, 1, 4, "full"), r"train.expert_parallel = 1 \(auto: the run fits"),
    "30B-A3B on larger devices": ("Qwen3-30B-A3B", 8, 141, {}, (1, 1, 1, "full"), r"rollout.tensor_parallel = 1 \(auto: the run fits"),
    "30B-A3B, parameters not to be shared out: experts before layers": (
        "Qwen3-30B-A3B", 8, 80, OPTIMIZER, (1, 4, 8, "optimizer"), r"train.expert_parallel = 4 \(auto: with fewer, parameters, gradients,",
    ),
    "30B-A3B on four: experts do not suffice": (
        "Qwen3-30B-A3B", 4, 80, {}, (4, 4, 4, "optimizer"), r"train.tensor_parallel = 4 \(auto: with fewer",
    ),
    "30B-A3B on four, engines with parts of all experts": (
        "Qwen3-30B-A3B", 4, 80, {"rollout": {"expert_parallel": 1}}, (4, 1, 4, "optimizer"), r"train.expert_parallel = 1 \(auto: the run",
    ),
    "30B-A3B on four, the experts' size given": (
        "Qwen3-30B-A3B", 4, 80, {"train": {"expert_parallel": 4}}, (4, 4, 4, "optimizer"), r"^train.tensor_parallel = 4 \(auto: with fewer",
    ),
    "Mixtral": ("Mixtral-8x7B", 8, 80, LONG_RESPONSES, (1, 4, 8, "full"), r"train.expert_parallel = 4 \(auto: with fewer"),
    "a size that is given": ("7B", 8, 80, {"train": {"tensor_parallel": 2}}, (2, 1, 2, "optimizer"), r"^rollout.tensor_parallel = 2"),
    "a size that is given, shards: a copy is needed anyway": (
        "7B", 8, 80, {"train": {"tensor_parallel": 2, "shard": "full"}}, (2, 1, 1, "full"), r"^rollout.tensor_parallel = 1 \(auto: the run",
    ),
    "a rollout size that is given": ("7B", 8, 80, {"rollout": {"tensor_parallel": 4}}, (1, 1, 4, "optimizer"), r"^train.tensor"),
    "a sequence size that is given leaves fewer for layers": (
        "7B", 8, 24, {"train": {"shard": "optimizer", "sequence_parallel": 2}}, (2, 1, 2, "optimizer"), r"nothing fits, and this takes",
    ),
    "nothing is legal": (OLMO, 8, 80, OPTIMIZER, (1, 1, 1, "optimizer"), r"train.tensor_parallel = 1 \(auto: no other size is legal"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIVISIONS)
def test_auto_divides_models_where_they_do_not_fit(case: str) -> None:
    shape, workers, gb, sections, expected, said = DIVISIONS[case]
    given, rollout = config(**sections), sections.get("algorithm") is None
    facts = to_divide(shape, workers, gb, given, ("actor",), rollout=rollout)
    found = choose_division(given, facts, within=min(8, workers), beside=8)
    fit = how_it_fits(given, facts, found, 8)
    assert (found.tensor, found.experts, found.rollout, fit.sharding.shard) == expected
    assert re.search(said, "\n".join(found.words)), found.words
    keys = [text.partition(" = ")[0] for text in found.words]
    assert len(set(keys)) == len(keys) and all(value_of(given, key) == "auto" for key in keys)
    assert (fit.why_not is None) or "nothing fits" in said or "no other size" in said


@pytest.mark.parametrize(
    ("experts", "width", "sections", "expected"),
    [
        (128, 768, {}, [(1, 1), (1, 2), (1, 4), (2, 2), (2, 1), (4, 4), (4, 1)]),
        (128, 770, {}, [(1, 1), (1, 2), (1, 4), (2, 2), (2, 1), (4, 4)]),  # parts of experts would differ in width
        (6, 768, {}, [(1, 1), (1, 2), (2, 2), (2, 1), (4, 1)]),  # so would numbers of experts
        (128, 768, {"train": {"expert_parallel": 1}}, [(1, 1), (2, 1), (4, 1)]),
        (128, 768, {"train": {"expert_parallel": 2}}, [(1, 2), (2, 2)]),
        (128, 768, {"train": {"tensor_parallel": 2}}, [(2, 1)]),
        (128, 768, {"rollout": {"expert_parallel": 1}}, [(1, 1), (1, 2), (1, 4), (2, 1), (4, 1)]),
    ],
)
def test_members_that_divide_layers_have_whole_experts_where_their_number_allows_it(
    experts: int, width: int, sections: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    shape, given = SHAPES["Qwen3-30B-A3B"] | {"num_experts": experts, "moe_intermediate_size": width}, config(**sections)
    facts = to_divide(shape, 4, 80, given, ("actor",))
    assert list(dict.fromkeys(pairs_of_sizes(given, facts, 4))) == expected


def test_engines_that_divide_experts_in_another_way_have_a_copy() -> None:
    """Members that learn have a part of every expert, those that sample some of the experts."""
    given, both = config(rollout={"tensor_parallel": 2, "expert_parallel": 2}), Division(2, 1, 2)
    facts = to_divide("Qwen3-30B-A3B", 8, 80, given, ("actor",))
    copied = divided(given, facts, both).copy_bytes
    assert copied == facts.actor.part(2, whole_experts=True).parameter_bytes > facts.actor.parameter_bytes // 2
    assert divided(given, facts, Division(2, 2, 2)).copy_bytes == 0
    assert divided(config(rollout={"tensor_parallel": 2}), facts, both).copy_bytes == 0
    of_parts, of_whole = (divided(given, facts, Division(2, size, 2)).actor.kept_bytes({"recompute": "none"}) for size in (1, 2))
    assert of_whole > of_parts, "members with whole experts keep rows for all choices"


def test_the_number_of_workers_that_divide_experts_in_rollouts_is_obeyed() -> None:
    given = config(rollout={"expert_parallel": 4}, train={"tensor_parallel": 4, "shard": "full"})
    for gb in (80, 141):
        assert choose_division(given, to_divide("Qwen3-30B-A3B", 8, gb, given, ("actor",)), within=8, beside=8).rollout == 4


def test_a_role_with_one_size_of_its_own_has_no_other() -> None:
    for of_ref, expected in (
        ({}, (2, 2)),
        ({"tensor_parallel": 1}, (1, 1)),
        ({"expert_parallel": 1}, (1, 1)),
        ({"tensor_parallel": 4}, (4, 1)),
    ):
        found = Division(2, 2, 2).of(config(ref=of_ref), "ref")
        assert (found.tensor, found.experts) == expected


def test_auto_divides_within_a_machine_only_and_for_all_roles() -> None:
    given = config(**OPTIMIZER)
    facts = to_divide("32B", 16, 80, given, ("actor",))
    assert choose_division(given, facts, within=8, beside=8).tensor == 4
    halves = choose_division(given, facts, within=2, beside=2)
    assert (halves.tensor, halves.rollout) == (2, 2) and "nothing fits, and this takes least" in halves.words[0]
    few_heads = RoleFacts.of_shape(Shape.named("0.5B"), given, "cuda", learns=True, role="critic")  # of 14: at most two
    mixed = replace(facts, roles={**facts.roles, "critic": few_heads})
    assert choose_division(given, mixed, within=8, beside=8).tensor == 2


def test_groups_that_reach_over_machines_come_last() -> None:
    """Two devices on each machine."""
    given = config(**OPTIMIZER)
    facts = to_divide("Qwen3-30B-A3B", 8, 80, given, ("actor",))
    assert list(dict.fromkeys(pairs_of_sizes(given, facts, 2))) == [(1, 1), (1, 2), (2, 2), (2, 1), (1, 4), (1, 8)]
    assert list(dict.fromkeys(pairs_of_sizes(given, facts, 8)))[:4] == [(1, 1), (1, 2), (1, 4), (1, 8)]
    found = choose_division(given, facts, within=2, beside=2)
    assert (found.tensor, found.experts) == (1, 8) and "; the group reaches over machines, because none within one" in found.words[0]
    together = config(train={"shard": "optimizer", "sequence_parallel": 2})  # two groups of members that divide layers
    found = choose_division(together, to_divide("32B", 16, 80, together, ("actor",)), within=4, beside=4)
    assert found.tensor == 4 and "reaches over machines" in found.words[0]
    within = choose_division(together, to_divide("32B", 16, 80, together, ("actor",)), within=8, beside=8)
    assert within.tensor == 4 and "reaches" not in within.words[0]


def test_auto_divides_nothing_where_there_is_nothing_to_gain() -> None:
    given = config(**OPTIMIZER)
    facts = to_divide("32B", 8, 80, given, ("actor",))
    assert choose_division(given, replace(facts, device="cpu", device_bytes=0), within=8) == Division()
    assert choose_division(given, replace(facts, sharding=UNSHARDED), within=1) == Division()
    compiled = choose_division(given, facts, within=8, only="train.compile is set")
    assert compiled == Division() and compiled.words[0] == "train.tensor_parallel = 1 (auto: train.compile is set)"
    by_hand = config(train={"tensor_parallel": 2, "expert_parallel": 1}, rollout={"tensor_parallel": 4})
    assert choose_division(by_hand, facts, within=8) == Division(2, 1, 4) and choose_division(by_hand, facts, within=8).words == ()


def test_roles_may_have_sizes_of_their_own() -> None:
    own = {"critic": {"tensor_parallel": 4}, "ref": {"expert_parallel": 4}, "reward_model": {"tensor_parallel": 1}}
    given = config(algorithm={"name": "ppo", "kl_coef": 0.1}, train={"tensor_parallel": 2}, **own)
    way = Division(2, 1, 2)
    sizes = {role: way.of(given, role) for role in ("actor", "critic", "ref", "reward_model")}
    assert sizes == {"actor": RoleSizes(2, 1), "critic": RoleSizes(4, 1), "ref": RoleSizes(1, 4), "reward_model": RoleSizes(1, 1)}
    whole = to_divide("Qwen3-30B-A3B", 8, 141, given, tuple(sizes))
    facts = replace(divided(given, whole, way), sharding=Sharding("full", 4, 4))
    assert {role: facts.parts_of(role) for role in sizes} == {"actor": 2, "critic": 4, "ref": 1, "reward_model": 1}
    shardings = {role: (facts.sharding_of(role).workers, facts.sharding_of(role).experts) for role in sizes}
    assert shardings == {"actor": (4, 1), "critic": (2, 1), "ref": (8, 4), "reward_model": (8, 1)}
    assert facts.roles["critic"].parameter_bytes == pytest.approx(whole.roles["critic"].parameter_bytes / 4, rel=0.01)
    assert facts.roles["ref"].parameter_bytes < 0.3 * whole.roles["ref"].parameter_bytes
    # What is left to auto is decided for the roles that follow [train].
    by_auto = config(algorithm={"name": "ppo"}, critic={"tensor_parallel": 1}, **OPTIMIZER)
    few_heads = RoleFacts.of_shape(Shape.named("0.5B"), by_auto, "cuda", learns=True, role="critic")
    both = replace(to_divide("32B", 8, 80, by_auto, ("actor",)), sharding=Sharding(workers=8))
    assert choose_division(by_auto, replace(both, roles={**both.roles, "critic": few_heads}), within=8, beside=8).tensor == 4
    of_experts = config(algorithm={"name": "ppo"}, critic={"expert_parallel": 1}, **OPTIMIZER)
    assert choose_division(of_experts, replace(both, roles={**both.roles, "critic": few_heads}), within=8, beside=8).tensor == 4


@pytest.mark.parametrize(
    ("sharding", "workers", "expected"),
    [
        (Sharding("hybrid", 16, 8), 32, Sharding("hybrid", 32, 8)),
        (Sharding("hybrid", 16, 8), 8, Sharding("full", 8, 8)),
        (Sharding("hybrid", 16, 8), 4, Sharding("full", 4, 4)),
        (Sharding("full", 16, 16), 1, Sharding("optimizer", 1, 1)),
        (Sharding("optimizer", 2, 2), 4, Sharding("optimizer", 4, 4)),
    ],
)
def test_what_other_numbers_of_workers_share_out(sharding: Sharding, workers: int, expected: Sharding) -> None:
    assert sharding.among(workers, 1) == expected


def test_an_evaluation_divides_the_one_model_that_it_has() -> None:
    given = config()
    whole = to_divide(QWEN_72B, 8, 141, given, ())
    actor = RoleFacts.of_shape(Shape.from_config(QWEN_72B), given, "cuda", learns=False)
    assert choose_division(given, replace(whole, roles={"actor": actor}), within=8, beside=8) == Division(2, 1, 2)


def test_the_plan_says_why_models_are_divided() -> None:
    facts = {"device": "cuda", "device_bytes": 80 * GIB, "host_bytes": 1000 * GIB, "longest": 512}
    words = ("train.tensor_parallel = 1 (auto: the run fits)",)
    plan = plan_of(Shape.named("7B"), config(), **facts, sharding=Sharding("optimizer", 8, 8), division=words)  # type: ignore[arg-type]
    assert words[0] in plan.words


def test_torch_is_not_imported() -> None:
    source = Path(__file__).parents[1] / "src"
    modules = sorted(f"fulltilt.plan.{file.stem}" for file in (source / "fulltilt" / "plan").glob("[!_]*.py"))
    assert "fulltilt.plan.make" in modules
    code = f"import sys, {', '.join(modules)}\nprint([name for name in ('torch', 'transformers') if name in sys.modules])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(source)}, check=True)
    assert child.stdout.strip() == "[]"
