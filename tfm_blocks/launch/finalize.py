"""Write the results of a finished run: weights, scores, translations and status.json; print the summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from tfm_blocks.data.corpus import Corpus
from tfm_blocks.data.settings import LabelsSettings
from tfm_blocks.errors import Problem, RunError, counted, printable
from tfm_blocks.language.spec import TARGET
from tfm_blocks.launch.run_spec import RunSpec
from tfm_blocks.metric_schema import LABEL_SCORES, PSEUDO, find_score
from tfm_blocks.network.build import network_without_values
from tfm_blocks.network.cost import axis_lengths, multiply_adds
from tfm_blocks.runs.checkpoints import NEVER, mean_weights, read_checkpoint
from tfm_blocks.runs.folder import BEST, CHECKPOINTS, LOSSES, METRICS, STATUS, TRANSLATIONS, step_file
from tfm_blocks.runs.metrics import read_rows, summarise
from tfm_blocks.runs.model import read_tensors, write_weights
from tfm_blocks.runs.records import SavedModel, SavedScores, Score, ScoredSet, Status, spread_text
from tfm_blocks.runs.row_results import TranslatedLine, hash_rows, write_losses, write_saved_scores, write_translations
from tfm_blocks.scoring.corpus import loss_statistics, metrics, score
from tfm_blocks.scoring.labels import label_statistics
from tfm_blocks.scoring.paired_test import ROUNDING, score_with_interval
from tfm_blocks.tracking.lightning_loggers import LightningLogger
from tfm_blocks.training.callbacks import score_news, validated_steps
from tfm_blocks.training.early_stopping import EarlyStopping
from tfm_blocks.training.module import TrainingModule
from tfm_blocks.training.settings import RunSettings, TrainerSettings
from tfm_blocks.translation.fill import visible_sources


def final_weights(settings: TrainerSettings, checkpoints: Path, step: int) -> Mapping[str, Tensor]:
    """Return the mean of the last `trainer.average` validations of a run of `step` steps, or the best weights."""
    if settings.average:
        return mean_weights([step_file(checkpoints, step) for step in settings.averaged_steps(step)])
    return read_tensors(checkpoints / BEST)


def expect_kept_weights(run: RunSettings, checkpoint: Path) -> None:
    """Raise RunError if weights that `final_weights` of a run resumed from `checkpoint` needs are missing."""
    folder, settings = checkpoint.parent, run.trainer
    state = read_checkpoint(checkpoint, mmap=True)
    (validated, best), patience = validated_steps(state), run.callbacks.early_stopping.patience
    waited = state["callbacks"].get(EarlyStopping.__name__, {}).get("waited", 0)
    left = max(patience - waited, 1) if patience else settings.steps  # validations until the earliest stop
    first_stop = validated + left * settings.validate_every
    steps = {*settings.averaged_steps(settings.steps), *settings.averaged_steps(min(first_stop, settings.steps))}
    needed = [step_file(folder, step) for step in sorted(steps) if step <= validated]
    if not settings.average and best != NEVER and not step_file(folder, best, "best").is_file():
        needed = [folder / BEST]
    rule = "is missing, but the final weights of the resumed run may need it"
    help = f"restore it, or start a new run: init_from={folder.parent}"
    if missing := [path for path in needed if not path.is_file()]:
        raise RunError([Problem(str(path), rule, help=help) for path in missing])


def finish(
    job: RunSpec, module: TrainingModule, weights: Mapping[str, Tensor], loggers: list[LightningLogger], stopped: str
) -> None:
    """Write the results of the run, and status.json last. Print the summary.

    `stopped` is the reason why a callback ended the run before its last step.
    """
    folder, (split, corpus) = job.folder, module.prepared.last_scored
    translations: Sequence[Score] = ()
    if module.scorer.outputs and module.settings.data.kind not in ("probe", "labels"):
        scorers = metrics(module.settings.trainer.bleu, tokenised=False)
        translations = score(module.scorer.outputs, corpus.text[TARGET], scorers)
    network = network_without_values(module.network.spec)
    lengths = axis_lengths(network, {})
    exact = {group: f"{split}/exact_match/{group}" for group in corpus.groups}
    status = Status(
        "done",
        f"stopped early: {stopped}" if stopped else "",
        steps=module.global_step,
        seconds=round(module.seconds, 1),
        scores=module.latest,
        halves=_half_intervals(module, split),
        scored_on=split,
        exact_match_by_group={group: module.latest[name] for group, name in exact.items() if name in module.latest},
        translation=tuple(translations),
        test_set=scored_set(corpus),
        parameters=network.parameter_count,
        multiply_adds=sum(multiply_adds(network, lengths).values()),  # of a row, as in `tfm show`
        lengths=lengths,
        **summarise(read_rows(folder / METRICS)),
    )
    write_weights(folder, weights)
    _write_rows(folder, module, status)
    status.write(folder)
    for logger in loggers:
        logger.log_weights(folder)
    pseudo = [module.pseudo[0]] if module.pseudo else []
    for line in _summary(job, module.settings, status, pseudo):
        print(printable(line))


def _half_intervals(module: TrainingModule, split: str) -> dict[str, float]:
    """Return half of the 95 % interval of scores of losses and labels, by the jackknife over rows or documents."""
    statistics = loss_statistics(module.row_losses)
    if isinstance(data := module.settings.data, LabelsSettings) and module.scorer.outputs:
        references = [reference for _, _, reference in module.scorer.samples]
        labels = label_statistics(module.scorer.outputs, references, data.coder)
        statistics |= {name: labels[name] for name in labels if name in LABEL_SCORES}
    measured = [name for name in statistics if f"{split}/{find_score(name).key}" in module.latest]
    halves = {name: score_with_interval(name, statistics[name])[1] for name in measured}
    return {name: half for name, half in halves.items() if half > ROUNDING}  # no row moves the other scores, or NaN


def _write_rows(run: Path, module: TrainingModule, status: Status) -> None:
    """Write the results of single rows of the test set: outputs, losses, and a pseudo-perplexity with its losses."""
    if module.scorer.samples:
        write_translations(run, [TranslatedLine(*sample) for sample in module.scorer.samples])
    write_losses(run, module.row_losses, module.row_corpora)
    if module.pseudo:
        score_of_texts, losses_D2 = module.pseudo
        saved = SavedScores("", status.test_set, {}, status.steps, None, (score_of_texts,))
        write_saved_scores(run, PSEUDO, saved, losses_D2=losses_D2)


def scored_set(corpus: Corpus) -> ScoredSet:
    """Return the number and the hash of the documents of packed text, which all tokenizers share, or of the rows."""
    if corpus.documents:
        return ScoredSet(len(corpus.documents.bytes_D), corpus.documents.sha256)
    return ScoredSet(len(corpus), hash_rows(corpus.rows(slice(None)), sorted(corpus.columns)))


def _summary(job: RunSpec, settings: RunSettings, status: Status, pseudo: Sequence[Score]) -> Iterator[str]:
    yield f"done: {counted(status.steps or 0, 'step')} in {status.seconds:.0f} s"
    if status.reason:
        yield status.reason
    yield score_news(dict(status.scores), status.scored_on)
    if status.exact_match_by_group:
        groups = status.exact_match_by_group.items()
        yield "exact: " + ", ".join(f"{group} {fraction:.1%}" for group, fraction in groups)
    prefix = f"{status.scored_on}/accuracy@"
    scores = status.scores.items()
    if by_length := [f"{name.removeprefix(prefix)} {one:.1%}" for name, one in scores if name.startswith(prefix)]:
        yield f"accuracy by length: {', '.join(by_length)}"
    for metric in (*status.translation, *pseudo):
        half = f" {spread_text(metric.value, *metric.ends)}" if metric.interval > 0 else ""
        yield f"{metric.name}: {metric.value:.2f}{half}   {metric.signature}"
    plugins = "".join(f" --plugins {module}" for module in SavedModel.read(job.folder).plugins)
    written = [TRANSLATIONS] if (job.folder / TRANSLATIONS).is_file() else []
    files = [METRICS, STATUS, *written, LOSSES, f"{CHECKPOINTS}/"]
    yield f"folder: {job.folder}   weights.safetensors {' '.join(files)}"
    example = "echo 'your text' | tfm " + ("translate" if status.translation else "generate")
    if settings.data.kind == "probe":
        example, plugins = "tfm show", ""
    elif not settings.objective.generates:
        sources = r"your text\t" * len(visible_sources(job.config))
        example = rf"printf '{sources}<mask>\n' | tfm fill" if sources else settings.objective.example
    yield f"next: {example} {job.folder}{plugins}"
