"""The environment of reward processes: paths, locale, proxies and devices, and the names in `reward.env`. No tokens, no keys.

Enters: the trainer's environment. Leaves: the variables that reward processes get, and the names of the others, so that an error message
can name a variable that a function lacks. Values go only into the processes: neither checkpoints nor messages hold them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fulltilt.records import UserError
from fulltilt.words import joined

PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TMP|TEMP|PWD|XDG_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_\w+"
    r"|LD_LIBRARY_PATH|DYLD_\w+|HF_\w+|HUGGINGFACE_HUB_CACHE|TRANSFORMERS_\w+|TORCH_HOME|TOKENIZERS_PARALLELISM|NLTK_DATA"
    r"|CUDA_\w+|NVIDIA_\w+|\w+_NUM_THREADS|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|(HTTP|HTTPS|FTP|ALL|NO)_PROXY|(http|https|ftp|all|no)_proxy|SYSTEMROOT"
)
SECRET = re.compile(r"TOKEN(?!IZERS)|KEY|SECRET|PASSWORD|CREDENTIAL")
SHORTEST_MENTIONED = 4  # letters: shorter names may occur in a file by chance


@dataclass(frozen=True)
class RewardEnvironment:
    variables: dict[str, str] = field(repr=False)
    removed: tuple[str, ...]  # names that the trainer has, but reward processes do not

    def note(self, text: str) -> str:
        """Return a sentence if `text`, a function's file and its error, mentions variables that the function cannot see; empty
        otherwise."""
        seen = [name for name in self.removed if len(name) >= SHORTEST_MENTIONED and re.search(rf"\b{re.escape(name)}\b", text)]
        if not seen:
            return ""
        verb, which = ("is", "it") if len(seen) == 1 else ("are", "them")
        return f"{joined(seen, 'and')} {verb} not passed to reward processes; add {which} to reward.env"


def make_environment(further: Sequence[str]) -> RewardEnvironment:
    """Make the environment. `further`: the names in `reward.env`. Raises UserError if one of them is not set."""
    if unset := [name for name in further if name not in os.environ]:
        verb, what, which = ("is", "variable", "it") if len(unset) == 1 else ("are", "variables", "them")
        remedy = f"Set the {what}, or remove {which} from reward.env"
        raise UserError(f"reward.env: {joined(unset, 'and')} {verb} not set in this environment. {remedy}")
    passed = {name for name in os.environ if name in further or (PASSED.fullmatch(name) and not SECRET.search(name))}
    variables = {name: value for name, value in os.environ.items() if name in passed}
    # There already is a process for every core, and thread pools take address space for every core of the machine.
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # Otherwise the order of a set of strings, and a score that depends on it, would change from worker to worker.
    variables.setdefault("PYTHONHASHSEED", "0")
    return RewardEnvironment(variables, tuple(sorted(os.environ.keys() - passed)))
