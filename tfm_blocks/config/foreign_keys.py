"""Names of settings in other toolkits, and the corresponding settings of tfm-blocks."""

from __future__ import annotations

FOREIGN_NAMES = {
    "the schedule sets the learning rate: schedule.scale of schedule=noam, schedule.peak of the others": (
        "lr learning_rate max_lr peak_lr init_lr"
    ),
    "data.step_tokens is the target tokens of an optimizer step; data.batch_tokens only caps memory": (
        "batch_size train_batch_size per_device_train_batch_size max_tokens"
    ),
    "data.batch_tokens cuts a step into micro-batches, whose gradients are added up": (
        "accumulate_grad_batches gradient_accumulation_steps update_freq accum_count batch_multiplier"
    ),
    "a run is measured in optimizer steps: trainer.steps": (
        "epochs max_epochs num_epochs num_train_epochs max_epoch max_steps max_updates max_update train_steps"
    ),
    "data.tokenizer=PATH needs text, dates or lm as data; a probe task has a fixed alphabet": "tokenizer",
    "schedule.warmup is the number of warm-up steps": (
        "warmup_steps num_warmup_steps warmup_updates warmup_ratio learning_rate_warmup"
    ),
    "trainer.validate_every is the number of steps between validations": (
        "val_check_interval eval_steps valid_steps validation_freq validate_interval_updates"
    ),
    "trainer.clip is the maximum gradient norm": "gradient_clip_val max_grad_norm clip_norm grad_clip",
    "trainer.devices is the number of processes; trainer.accelerator is auto, cpu or a device type of torch": (
        "gpus num_gpus n_gpu num_processes nproc_per_node"
    ),
    "trainer.test_beam is the beam size of the final test": "beam beam_size num_beams",
    "a key of the root: write dropout=0.1": "dropout",
    "a key of the root: write heads=8": "num_heads n_heads n_head nhead num_attention_heads",
    "a key of the root: write layers=6": "num_layers n_layers n_layer num_hidden_layers",
    "a key of the root: write d_model=512": "hidden_size embed_dim n_embd dim",
    "a key of the root: write d_ff=2048": "intermediate_size ffn_dim dim_feedforward",
    "a key of the root: write vocab=10000": "vocab_size",
    "a key of the root: write label_smoothing=0.1": "label_smoothing_factor",
}
ADVICE = {word: advice for advice, words in FOREIGN_NAMES.items() for word in words.split()}


def advice(key: str) -> str:
    """Return the advice for the unknown `key` by its last part, or "" if there is none."""
    return ADVICE.get(key.rpartition(".")[2], "")
