"""Models that a run can name, each as a plan without torch and as modules.

Interface       model_spec (what plans, builds and exports ask of a model), registry (the names),
                refusals (runs that need more than a model can do).
GPT             gpt_spec, gpt_layout and gpt_numbers (without torch), gpt (the modules), gpt_cache;
                hugging_face and hugging_face_* (its transformers folder, there and back).
transformers    transformers_spec, transformers_layout, transformers_numbers and
                transformers_refusals (without torch); transformers_meta (an empty model),
                transformers_model (a rank's stage), transformers_experts, transformers_heads,
                transformers_rope, transformers_cache; transformers_folder and
                transformers_weights (its files).
Without a table transformers_found reads a family from its modules; transformers_cuts has the rules
                of a split. A small copy (shrunk_config, transformers_small) tries a split
                (transformers_trial), stages (transformers_staged), context
                (transformers_context) and documents (transformers_documents, document_rows).
                transformers_writer writes what was found as a table of families/.
Adapters        lora_layout, lora_folder, transformers_lora.
Your own model  tensor_parallel (`tensor_parallel(module)`) with find_split, tables and plan_text.
"""
