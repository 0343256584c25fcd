import json, os, sys, time
import numpy as np, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from fulltilt.model import attention
from fulltilt.model.verify import verify
from fulltilt.records import Prompt
from fulltilt.rollout.engine import EngineLimits, NativeEngine
from fulltilt.rollout.sampler import Sampling
from fulltilt.rollout.collect import collect

class Tok:
    all_special_ids = []
    def decode(self, ids, **k): return ""

SHAPES = {"0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
          "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True),
          "7B": dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, tie_word_embeddings=False)}

def build(name):
    torch.manual_seed(0)
    cfg = Qwen2Config(**SHAPES[name], max_position_embeddings=32768, attn_implementation=attention.register())
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2ForCausalLM(cfg).eval()
        torch.set_default_dtype(torch.float32)
    return model

out = {}
for name in sys.argv[1].split(","):
    model = build(name)
    layers = verify(model)
    if os.environ.get("FUSE"):
        from fulltilt.model.fuse import fuse
        print(fuse(model, gradient=False))
    rng = np.random.default_rng(0)
    prompts = [Prompt(uid=i, ids=rng.integers(0, 150000, int(rng.integers(96, 512))), text="") for i in range(128)]
    longest = max(len(p.ids) for p in prompts)
    for graphs in (False, True):
        new = 400 if graphs else 60
        engine = NativeEngine(model, Tok(), frozenset({151999}), layers, EngineLimits(1024 * ((longest + 400) // 16 + 2), 16, 1024, 16384, cuda_graphs=graphs))
        if graphs: collect(engine, prompts[:8], Sampling(samples=8, max_new_tokens=40), 1, lambda g: None)
        torch.cuda.synchronize(); t = time.perf_counter()
        groups = collect(engine, prompts, Sampling(samples=8, max_new_tokens=new), 7, lambda g: None)
        torch.cuda.synchronize(); s = time.perf_counter() - t
        tokens = sum(len(x.ids) for g in groups for x in g.samples)
        t2 = time.perf_counter(); groups2 = collect(engine, prompts, Sampling(samples=8, max_new_tokens=new), 7, lambda g: None); torch.cuda.synchronize(); s2 = time.perf_counter() - t2
        same = all((a.ids == b.ids).all() for g, h in zip(groups, groups2) for a, b in zip(g.samples, h.samples))
        out[f"{name} graphs={graphs}"] = dict(tokens=tokens, first_s=s, again_s=s2, tokens_per_s=tokens / s2, same=bool(same), captures=engine.decoder.captures, stats=engine.stats().metrics(), peak_gib=torch.cuda.max_memory_allocated() / 2**30)
        print(json.dumps({k: v for k, v in out[f"{name} graphs={graphs}"].items() if k != "stats"}), flush=True)
        if graphs:
            # where a step's time goes: graph replays alone
            d = engine.decoder
            for size in (1, 32, 256, 512, 1024):
                engine.runner.acquire(); d.use_cache(*engine.runner.caches)
                from fulltilt.rollout.decode import DecodeRow
                per = engine.limits.blocks // size
                ctx = 500
                rows = [DecodeRow(5, ctx, 5, np.uint64(i), list(range(i * (ctx // 16 + 3), (i + 1) * (ctx // 16 + 3)))) for i in range(size)]
                d._fill(rows, size, Sampling(max_new_tokens=400)); g = d._graph(size, False); torch.cuda.synchronize()
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                a.record()
                for _ in range(20): g.replay()
                b.record(); torch.cuda.synchronize()
                out[f"{name} replay {size}"] = a.elapsed_time(b) / 20
                print(name, "replay ms", size, a.elapsed_time(b) / 20, flush=True)
        # agreement with the trainer
        from fulltilt.train.roles import Policy
        from fulltilt.batching.pack import MicroSizing, forward_micro_batches
        from fulltilt.records import Row
        some = [(g, x) for g in groups[:16] for x in g.samples[:2]]
        rows = [Row(ids=np.concatenate([g.prompt.ids, x.ids]), mask=np.arange(len(g.prompt.ids) + len(x.ids)) >= len(g.prompt.ids)) for g, x in some]
        engine.release()
        ours = []
        micro = forward_micro_batches(rows, MicroSizing(True, 16384))
        role = Policy("actor", model, 1.0)
        from fulltilt.batching.pack import scatter
        done = scatter(rows, micro, [role.annotate(m) for m in micro], "old_logprobs")
        gap = np.mean(np.concatenate([np.abs(r.old_logprobs[r.mask] - x.logprobs) for r, (g, x) in zip(done, some)]))
        out[f"{name} graphs={graphs} gap"] = float(gap); print("gap", gap, flush=True)
        engine.close(); del engine
    if len(sys.argv) > 2:
        d = None
    del model; torch.cuda.empty_cache()
json.dump(out, open(os.environ["OUT"] + "/try.json", "w"), indent=1)
