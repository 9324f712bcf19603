"""Media and facts that a run logs besides its metrics, with their descriptions."""

from __future__ import annotations

MEDIA = {  # tables and images that are logged at each validation
    "samples/val": "table of source, output and reference for the first validation sentences, "
    "the same in each validation",
    "samples/test": "the same table for the test set, logged once",
    "attention/1": "image of each attention head for a short validation sentence, the same in each validation",
    "attention/2": "the same images for another sentence",
}
LABEL_MEDIA = {  # of runs whose labels are classes
    "confusion/val": "image of the confusion matrix of the validation labels; `objective=label` with classes",
    "confusion/test": "the same image for the test labels, logged once",
}
FACTS = {  # known at the start of a run, besides its config: `facts.NAME`
    "model": "name of the model",
    "parameters": "number of parameters; tied and shared ones count once",
    "parameters_asked": "number of parameters with the requested vocabulary size, as in `tfm show`",
    "parameters_by_node": "number of parameters by node address",
    "optimizer_groups": "optimizer, range of rate factors, decay and size of each group of weights",
    "config_hash": "equal for runs that differ only in their seed, or in keys that a resume may change",
    "git_commit": "commit of the folder in which the run started, with -dirty if files differ from it",
    "seed": "seed of weights, order and dropout",
    "resumed": "number of resumes",
    "command": "newest command line",
    "hardware": "kind and name of the device, number of devices, nodes and CPU cores",
    "precision": "chosen precision, and the reason",
    "versions": "versions of Python and the libraries",
}
