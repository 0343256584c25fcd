"""Scaling of the models of time by what a probe has measured of this device and its host.

Enters: the description of a run, and what a worker has measured before its first step. Leaves: a `Calibration`. Guaranteed: arithmetic
alone; a factor without a measurement is 1, and no factor scales a model by more than `MOST`.

A pass on a GPU takes the seconds of the GPU's own work or those of the host's launches, whichever are more: small micro-batches measure the
host, and larger ones that take clearly longer measure the device. Two rollouts of different lengths differ by decode steps alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from fulltilt.records import Probed, RolloutPass, UpdatePass
from fulltilt.tune.description import AS_MODELLED, BatchDescription, Calibration, RunDescription
from fulltilt.tune.lengths import Lengths
from fulltilt.tune.probe import waiting_and_others
from fulltilt.tune.time_model import OF_HOST, Passes, generation_seconds, pass_seconds

# How far the time of the same launches varies on a host that is shared with others, as a factor. The models miss a device by as much: of 40
# runs on an H200 (docs/bench/predictions_jobs.json) they describe 37 within 15%.
NOISE = 1.15
MOST = 4.0  # largest factor by which a measurement may scale a model up or down: beyond that, something else was measured
OF_STEPS = ("weights", "products", "keys and values", "sampling", "collectives", "short kernels", "launches")  # causes of decode steps


def calibrate(run: RunDescription, probed: Probed) -> Calibration:
    """Return the factors that the measurements give for the device and the host of a run."""
    found = of_updates(run, probed.updates)
    return of_rollouts(replace(run, calibration=found), probed.rollouts)


def in_words(found: Calibration) -> str:
    """Describe the calibration for people."""
    parts = [f"the host's launches {found.host:.2f}", f"micro-batches {found.passes:.2f}", f"decode steps {found.decoding:.2f}"]
    return f"probe: here {', '.join(parts)} times the seconds of the models, by which predictions are scaled"


# ---- passes over micro-batches -----------------------------------------------------------------------------------------------------------


def of_updates(run: RunDescription, passes: Sequence[UpdatePass]) -> Calibration:
    timed = [own for own in passes if own.seconds]
    if not timed or run.offload_activations:  # offloaded activations keep the link to the host busy as long as the device, or longer
        return AS_MODELLED
    waiting, others = waiting_and_others(timed)
    models = {own: seconds_of_pass(run, own) for own in timed}
    host = believed([(own.seconds or 0.0) / models[own][0] for own in waiting])
    device = [(own.seconds or 0.0) / models[own][1] for own in others]
    if not others:  # the device was never the bottleneck: the measurements only show that it was not slower than this
        device = [min(1.0, *((own.seconds or 0.0) / models[own][1] for own in waiting))]
    return Calibration(host=host, passes=believed(device))


def seconds_of_pass(run: RunDescription, own: UpdatePass) -> tuple[float, float]:
    """Return the seconds of the host and of the device that the models predict for a measured micro-batch."""
    length = max(2, round(own.pairs / own.tokens))
    alone = replace(run.system, hidden=0.0)
    same = replace(run, lengths=Lengths(1, length - 1, 1.0, length - 1.0), system=alone, calibration=AS_MODELLED, others=())
    found = pass_seconds(same, Passes(own.tokens, own.tokens / length, 1, 1, learns=True))
    host = sum(seconds for cause, seconds in found.items() if cause in OF_HOST)
    return host, sum(found.values()) - host


def believed(ratios: Sequence[float]) -> float:
    """Return the factor for these ratios of measured to modelled seconds; 1 if there are none. Within the noise either the models or the
    measurement may be wrong: there a factor counts by half its logarithm; the part beyond the noise counts whole."""
    found = max(1 / MOST, min(MOST, fmean(ratios))) if ratios else 1.0
    return found / math.sqrt(max(1 / NOISE, min(NOISE, found)))


# ---- rollouts ----------------------------------------------------------------------------------------------------------------------------


def of_rollouts(run: RunDescription, rollouts: Sequence[RolloutPass]) -> Calibration:
    """Return the run's calibration with the factors that its rollouts give."""
    if len(rollouts) < 2 or not run.rollout:
        return run.calibration
    short, long = min(rollouts, key=lambda own: own.response_tokens), max(rollouts, key=lambda own: own.response_tokens)
    (steps, others), (more, _) = steps_and_others(run, short), steps_and_others(run, long)
    if more <= steps:
        return run.calibration
    decoding = believed([(long.decode_seconds - short.decode_seconds) / (more - steps)])
    return replace(run.calibration, decoding=decoding, rollout_s=max(0.0, short.seconds - short.decode_seconds - others))


def steps_and_others(run: RunDescription, own: RolloutPass) -> tuple[float, float]:
    """Return the seconds that the models predict for the decode steps and for everything else of a measured rollout."""
    lengths = Lengths(own.prompt_tokens, own.response_tokens, float(own.prompt_tokens), float(own.response_tokens))
    prompts = own.prompts * run.engines  # as if each engine had this many
    batch = BatchDescription(prompts=prompts, samples=own.samples, minibatch_prompts=prompts)
    found = generation_seconds(replace(run, lengths=lengths, batch=batch, others=())).causes
    steps = sum(seconds for cause, seconds in found.items() if cause in OF_STEPS)
    return steps, sum(found.values()) - steps
