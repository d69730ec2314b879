"""The way from files to token ids and back. No torch.

Files           documents (of text, JSON lines and parquet), parquet_rows, data_fingerprint, mapped.
Rows            chat with chat_rows, chat_turns and chat_jinja; preference_pairs, pair_rows;
                row_notes (notes on how rows were read), template_date.
Ids             token_encoder (a document), token_workers (processes side by side), token_cache
                with token_checks (kept by content), token_bar; prompts (and ids as a text).
Texts of a run  texts (where they are, what is wrong with them), split (validation).
"""
