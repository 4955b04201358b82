# SPDX-License-Identifier: Apache-2.0
"""Beyond the paper: what else could be kept, stored and asked, at the bytes that SPIN reads.

capture.py    traces of documents with their true answers fed
variants.py   ways to decide that are for study alone
arms.py       the variants by name, and what each costs
rivals.py     rules of the study's rivals on traces
measure.py    what a variant missed on a document, and the bytes it read
findings.py   figures with intervals, and differences at equal bytes
table.py      the same as Markdown
compare.py    what several checkpoints have in common
defaults.py   one default for each sparsity
layers.py     a target for each layer, as the product's calibration finds it
"""
