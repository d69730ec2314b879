"""The YAML file of a run as checked values. No torch. The files in reading order.

Reading         yaml_loader (values and the line of each key), written_text (text keys as written),
                load (file and overrides to a `RunConfig`, or one list of problems).
Keys            schema (the sections in order), types and node_types (the types of keys),
                data_section, model_section, optim_section, embedding_section, slurm, site.
Choices         optimizers, preference_losses, head_tasks (what a key can name, one row each).
Rules           rules and rules_data, rules_experts, rules_model, rules_optim, rules_pipeline (rules
                across keys), check (runs them), all_problems (problems of later checks too), errors
                (problems, and the one error that lists them).
Sizes           elastic (other numbers of ranks), job_geometry (nodes and tasks of a job).
Other files     hugging_face (a transformers folder), head_of_run, chat_templates, text_ends,
                cached_datasets, data_split, packages.
"""
