"""What mutations choose from, one to a line. Rewards and templates are code; elsewhere a backslash begins an escape, as in Python."""

from __future__ import annotations


def code(block: str) -> tuple[str, ...]:
    return tuple(line for line in block.splitlines() if line)


def texts(block: str) -> tuple[str, ...]:
    return tuple(line.encode("latin-1", "backslashreplace").decode("unicode_escape") for line in code(block))


def in_bytes(block: str) -> tuple[bytes, ...]:
    return tuple(text.encode("latin-1") for text in texts(block))


# ---- configuration and command line ------------------------------------------------------------------------------------------------------

LINES_OF_RUN_FILES = (
    *in_bytes(r"""
[run]
[[run]]
x
= 3
a.b.c = 1
"" = 1
run.steps = 3
[model.path]
x = 1979-05-27
# \xff
\x1b[2J = 1
x = '''
x = "\\ud800"
run = 3
x = {a = 1}
"""),
    b"x = 0x" + b"f" * 400,
    b"x = " + b"[" * 3000,
    b"x = " + b"9" * 5000,
)

ARGUMENTS = (
    *texts(r"""
--train.lr
--train.lr=1e-4
train.lr
train.lr 1e-4
=
run.steps=
=3
~train.lr
~lora.rank
~x
-x
--json
--
--quiet
--help
--latest
--check
run.steps=[
run.steps=1,2
a.b.c.d=1
run=3
run.toml
other.toml
.
model
\udcff
\xe9=1
lr=1e-4
--lr
-q
+run.steps=3
run/steps=3
run.steps==3
run.steps= 3
'run.steps=3'
train_batch_size=4
actor_rollout_ref.actor.optim.lr=1e-6
trainer.total_epochs=1
learning_rate=1
\x1b[2J=1
"""),
    "x" * 5000,
)

RUN_FILES = (
    *texts(r"""
none.toml
.
model
reward.py
train.jsonl
/dev/null
x\nby
run.toml/
pipe
loop
home
"""),
    "",
    "a" * 300,
)

PATHS = (
    *texts(r"""
none
.
/
~
~/x
~nobody/x
run.toml
reward.py
notes.txt
model/config.json
home
model
train.jsonl
reward.py:other
reward.py:
:
x\0y
org/name
none:score
/:score
"""),
    "",
    "a" * 300,
)

# Words of a command line, after which nothing follows.
COMMANDS = tuple(
    tuple(line.split(" "))
    for line in (
        *texts(r"""
doctor
doctor run
doctor run --json
doctor model
doctor none
knobs \udcff
knobs token_budget
knobs --all
knobs --all lr
plot
plot none --out x.png
plot model --out plot.json
plot run --out /dev/full
plot run --out model
plot run --metric \x1b[2J --out plot.json
plot run run --smooth 99999999999999999999 --out plot.json
plot notes.txt --out plot.json
plot model/model.safetensors --out plot.json
plot run/metrics.jsonl --out plot.json
plot run --against x --out plot.json
plot run --title $\\frac{ --out plot.png
plot run --out notes.txt
plot run --out none/plot.json
train
train --help
eval
trian
--version
train run.toml run.toml
bench
prove no_such_knob
init
init --help
init x
init grpo
init sft run.toml
init ppo new.toml
init dapo new.toml --json
init grpo none/new.toml
chat
chat none
chat model
chat run
chat notes.txt
chat model --json
"""),
        "knobs " + "x" * 500,
        "plot run --out " + "x" * 300 + ".json",
    )
)

# ---- data --------------------------------------------------------------------------------------------------------------------------------

LINES_OF_DATA = (
    *in_bytes(r"""
null
[]
3
"x"
{
{}
{"prompt": "1", "prompt": "2"}
{"prompt": NaN}
{"prompt": "\\ud800"}
{"prompt": "\xff"}
\x1b[2J
[1, 2]
{"a": {"a": 1, "a": 2}}
{"prompt": "1", "ground_truth": {"a": 1, "a": 2}}
{'prompt': '1'}
{"prompt": "1",}
// comment
\0
\xef\xbb\xbf{}
"""),
    b"",
    b" ",
    b'{"prompt": ' + b"[" * 5000,
    b'{"prompt": ' + b"9" * 5000 + b"}",
)

TEMPLATES = (
    *code(r"""
{{ 1 / 0 }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{{ raise_exception('no') }}
{{ messages[99].content }}
{{ x.y.z }}
{% include 'x' %}
{{ 'a' * 10000000 }}
{% if %}
{{
{{ messages | nothing }}
{{ ''.__class__.__mro__ }}
constant
{{ 10 ** 10 ** 9 }}
{{ messages | tojson }}
{{ strftime_now('%Y') }}
{% for m in messages %}{{ m.content.x() }}{% endfor %}
{{ range(10**12) | list }}
{% generation %}x{% endgeneration %}
{{ namespace().x }}
{{ cycler() }}
{{ lipsum(n=1000) }}
{{ bos_token + none }}
{{ 'é' }}
"""),
    "",
    "\x1b[2J{{ messages[0].content }}",
    "{{ messages[0]['content'] }}" * 1000,
)

# ---- run folder --------------------------------------------------------------------------------------------------------------------------

RUN_FOLDERS = (
    *texts(r"""
.
./
model
home
~/x
~nobody/x
~
x\0y
/dev/null/x
/proc/x
/sys/x
deep/er/run
run.toml
reward.py/x
with space
\u202erun
\xe9
\x1b[2J
notes.txt
tmp
-x
%s
$HOME/x
new/../run
con:
x\ny
link
loop
"""),
    "a" * 300,
    "x/" * 300 + "y",
)

FOREIGN_FILES = texts(r"""
metrics.jsonl
rollouts/step-000001.jsonl
run.toml
plan.json
validation/x
checkpoints/step-5/x
.lock
thesis.tex
checkpoints/mine
""")

STRANGERS = (
    *texts(r"""
checkpoints/step-00000009
checkpoints/step-99999999999999999999
checkpoints/step-x
checkpoints/mine
checkpoints/step-00000002.partial-1
rollouts/step-x.jsonl
rollouts/mine.jsonl
\x1b[2J
checkpoints/.trash-step-00000001-1
checkpoints/step-00000001.replaced
"""),
    "x" * 200,
)

# ---- rewards -----------------------------------------------------------------------------------------------------------------------------

BODIES = code(r"""
raise RuntimeError('no')
raise SystemExit(3)
raise KeyboardInterrupt
raise BaseException('no')
1 / 0
assert False
return score(1, 2, 3, 4)
raise RuntimeError('\x1b]0;owned\x07')
raise RuntimeError('x' * 10**6)
raise RuntimeError('\ud800')
raise type('\x1bX', (Exception,), {})()
raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()
raise ExceptionGroup('g', [ValueError(1)])
yield 1
while True: pass
time.sleep(1000)
input()
sys.exit()
os._exit(0)
os._exit(3)
os.abort()
os.kill(os.getpid(), 9)
os.kill(os.getpid(), 11)
os.kill(os.getppid(), signal.SIGTERM); return 0.0
os.kill(os.getppid(), 9); return 0.0
os.killpg(os.getpgid(os.getppid()), 15); return 0.0
os.fork(); return 0.0
os.fork() or time.sleep(1000); return 0.0
subprocess.Popen(['sleep', '1000']); return 0.0
subprocess.Popen(['sleep', '1000'], start_new_session=True); return 0.0
os.closerange(0, 1000); return 0.0
os.chdir('/'); return 0.0
threading.Thread(target=time.sleep, args=(1000,)).start(); return 0.0
print('\x1b]0;owned\x07' * 1000); return 0.0
sys.stdout.close(); return 0.0
open('run/metrics.jsonl', 'w').write('owned'); return 0.0
import shutil; shutil.rmtree('run'); return 0.0
bytearray(10**11)
'a' * 10**10
sys.setrecursionlimit(10**9); return score(1, 2, 3, 4)
import ctypes; ctypes.string_at(0)
del os.environ['PATH']; return 0.0
return os.environ['SECRET_TOKEN']
sys.modules.clear(); return 0.0
signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)
import no_such_module
__import__('gc').disable(); return 0.0
""")

ANSWERS = code(r"""
None
float('nan')
float('inf')
'x'
'1.0'
True
1e308
-1e308
10**400
1j
[]
[1.0]
{}
{'score': None}
{'score': 1e308}
{'reward': 1.0}
{'score': 1.0, 'x': 'y'}
{'score': 1.0, 'x': float('nan')}
{'score': 1.0, 3: 4}
{'score': 1.0, '\x1b[2J': 1.0}
{'score': 1.0, '\ud800': 1.0}
{'score': 1.0, '': 1.0}
{'score': 1.0, **{str(n): n for n in range(5000)}}
{'score': 1.0, 'answer': 'x' * 10**6}
{'score': 1.0, 'pred': '\x1b[2J'}
(1.0, 'x')
object()
lambda: 1
b'1'
type('F', (float,), {})(1.0)
type('F', (), {'__float__': lambda self: 1 / 0})()
{'score': 1.0, 'x': {'y': 1}}
{'score': {'score': 1.0}}
1e-320
__import__('decimal').Decimal('1')
__import__('numpy').float32(1)
__import__('numpy').array([1.0])
__import__('numpy').float64('nan')
{'score': 1, 'x': 2**63}
len(solution_str) * 1e300
""")

REWARD_FILES = (
    *in_bytes(r"""
def score(:
score = 3
\xff\xfe
def score():\n    return 1.0\n
def score(x, y, z):\n    return 1.0\n
raise RuntimeError('at import')
import sys; sys.exit(3)
import os; os._exit(0)
while True: pass
import no_such_module
print('\\x1b[2J')\ndef score(solution_str):\n    return 1.0\n
class score:\n    pass\n
async def score(solution_str, ground_truth):\n    return 1.0\n
async def score(solution_str, ground_truth):\n    import asyncio\n    await asyncio.sleep(1000)\n
async def score(solution_str):\n    raise ValueError('no')\n
def score(*args):\n    return 1.0\n
def score(**kwargs):\n    return 1.0\n
def score(solution_strs, ground_truths):\n    return [1.0]\n
def score(solution_strs):\n    return None\n
def score(solution_strs, **_):\n    return [1.0] * 1000\n
import time\ntime.sleep(1000)\n
def score(solution_str, ground_truth, missing):\n    return 1.0\n
score = len
from run import x
\0
import score
"""),
    b"",
)
