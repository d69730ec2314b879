"""Families of transformers as tables: sizes, parameters and how each is cut. No torch.

table        the language of tables: `Weights` lists parameters, `Family` is a table
gpt2, ...    tables by hand, one family or several alike a file; fused: what several share
written      tables that the finder wrote, in written.json: Llama and the families with its names
registry     model_type -> table
found        such a model as a `Family`, from what transformers' modules show

`model.hf` takes layouts, split layers, checkpoints and exports from a table
(models/transformers_layout.py), and so does `tensor_parallel(model)` (models/find_split.py).
"""
