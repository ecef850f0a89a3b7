"""GRPO of a tiny model with `vllm serve`, as TRL has it: of refitd it has the URL of `refitd front`, and nothing else.

    python examples/trl/grpo_front.py MODEL FRONT_URL [OUT]

MODEL has a tokenizer. Server and front are started as docs/trainers.md says. TRL wants vLLM in this environment, too.
"""

import sys

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

model, front = sys.argv[1:3]
out = sys.argv[3] if len(sys.argv) > 3 else "build/grpo"


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
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        model_init_kwargs={"dtype": "bfloat16"},  # as the server has it
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=front,
    ),
    reward_funcs=reward,
    train_dataset=Dataset.from_list([{"prompt": f"line {number}"} for number in range(20)]),
)
trainer.train()
print("trained", trainer.state.global_step)
trainer.accelerator.end_training()  # ranks leave their group before their processes end
