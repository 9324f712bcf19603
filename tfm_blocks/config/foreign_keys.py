"""Names of settings in other toolkits, and the corresponding settings of tfm-blocks."""

from __future__ import annotations

FOREIGN_NAMES = {
    "the schedule sets the learning rate: schedule.scale of schedule=noam, schedule.peak of the others": (
        "lr learning_rate max_lr peak_lr init_lr"
    ),
    "choose a schedule: write schedule=linear, cosine, wsd, …": (
        "lr_scheduler lr_scheduler_type decay_method scheduling"
    ),
    "schedule.warmup is the warm-up, in steps or as a fraction of the run": (
        "warmup_steps num_warmup_steps warmup_updates warmup_ratio learning_rate_warmup"
    ),
    "optimizer.weight_decay is the weight decay": "weight_decay wd",
    "data.step_tokens is the number of target tokens per optimizer step; data.batch_tokens only limits memory": (
        "batch_size train_batch_size per_device_train_batch_size max_tokens"
    ),
    "data.batch_tokens cuts a step into micro-batches, whose gradients are added up": (
        "accumulate_grad_batches gradient_accumulation_steps update_freq accum_count batch_multiplier"
    ),
    "data.context is the number of tokens per row of a language model": "block_size context_length seq_len",
    "data.tokenizer=PATH uses an existing tokenizer; a probe task has a fixed alphabet": "tokenizer",
    "trainer.steps is the length of a run, in optimizer steps": (
        "epochs max_epochs num_epochs num_train_epochs max_epoch max_steps max_updates max_update train_steps"
    ),
    "trainer.validate_every is the number of steps between validations": (
        "val_check_interval eval_steps valid_steps validation_freq validate_interval_updates"
    ),
    "trainer.checkpoint_every is the number of steps between checkpoints": (
        "save_steps save_interval_updates save_checkpoint_steps"
    ),
    "trainer.checkpoint_keep is the number of checkpoints that are kept": "save_total_limit keep_checkpoint",
    "callbacks.early_stopping.patience ends a run that no longer improves": "patience early_stopping_patience",
    "trainer.clip is the maximum gradient norm": "gradient_clip_val max_grad_norm clip_norm grad_clip",
    "trainer.precision is auto, bf16 or fp32": "bf16 fp16",
    "trainer.devices is the number of processes; trainer.accelerator is auto, cpu or a device type of torch": (
        "gpus num_gpus n_gpu num_processes nproc_per_node"
    ),
    "trainer.test_beam is the beam size of the final test; tfm translate has --beam": "beam beam_size num_beams",
    "it is at the top level of the config: write dropout=0.1": "dropout",
    "it is called heads: write heads=8": "num_heads n_heads n_head nhead num_attention_heads",
    "it is called layers: write layers=6": "num_layers n_layers n_layer num_hidden_layers",
    "it is called d_model: write d_model=512": "hidden_size embed_dim n_embd dim",
    "it is called d_ff: write d_ff=2048": "intermediate_size ffn_dim dim_feedforward",
    "it is called vocab: write vocab=10000": "vocab_size",
    "it is called label_smoothing: write label_smoothing=0.1": "label_smoothing_factor",
}
ADVICE = {word: advice for advice, words in FOREIGN_NAMES.items() for word in words.split()}


def advice(key: str) -> str:
    """Return the advice for the unknown `key` by its last part, or "" if there is none."""
    return ADVICE.get(key.rpartition(".")[2], "")
