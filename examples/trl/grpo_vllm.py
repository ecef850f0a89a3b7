"""GRPO of a tiny model with `vllm serve`: TRL generates there, and refitd updates it in the place of TRL's broadcast.

    python examples/trl/grpo_vllm.py ROOT RUN SERVICE_URL MODEL VLLM_URL

MODEL has a tokenizer. The server is started as docs/trainers.md says. TRL wants vLLM in this environment, too.
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from refitd_client.trainers.trl import RefitServerCallback

root, run, service, model, server = sys.argv[1:6]
out = sys.argv[6] if len(sys.argv) > 6 else "build/grpo"


def reward(completions: list[str], **_: object) -> list[float]:
    """More for each different character."""
    return [float(len(set(text))) for text in completions]


torch.manual_seed(0)
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(
        output_dir=out,
        max_steps=2,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=server,
    ),
    reward_funcs=reward,
    train_dataset=Dataset.from_list([{"prompt": f"line {number}"} for number in range(20)]),
    callbacks=[RefitServerCallback(root, run, service, dtype=torch.bfloat16)],
)
trainer.train()
print("trained", trainer.state.global_step)
trainer.accelerator.end_training()  # ranks leave their group before their processes end
