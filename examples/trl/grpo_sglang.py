"""GRPO of a tiny model whose rollouts come from the SGLang engines that refitd updates.

python examples/trl/grpo_sglang.py ROOT RUN SERVICE_URL MODEL
"""

import os
import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from refitd_client.trainers.trl_rollouts import RefitRollouts

root, run, service, model = sys.argv[1:5]
out = sys.argv[5] if len(sys.argv) > 5 else "build/grpo"

# The tiny model has no tokenizer: its tokens are the numbers from 0 to 31.
words = Tokenizer(models.WordLevel({str(number): number for number in range(32)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="30", eos_token="31")

generated_by: list[str] = []


def reward(completion_ids: list[list[int]], weight_version: list[str], **_: object) -> list[float]:
    """More for each 7. `weight_version` is the step of the weights that a completion comes from."""
    generated_by.extend(weight_version)
    return [ids.count(7) / len(ids) for ids in completion_ids]


refit = RefitRollouts(root, run, service, every=1, engine_key=os.environ.get("ENGINE_KEY"))
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(
        output_dir=out,
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=8,
        model_init_kwargs={"dtype": "auto"},  # that of the model's files, and so the engines'
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    ),
    reward_funcs=reward,
    train_dataset=Dataset.from_list([{"prompt": f"16 {number % 16}"} for number in range(32)]),
    processing_class=tokenizer,
    rollout_func=refit,
    callbacks=[refit],
)
trainer.train()
print(f"trained {trainer.state.global_step}, rollouts came from steps {' '.join(dict.fromkeys(generated_by))}")
trainer.accelerator.end_training()  # ranks leave their group before their processes end
