"""The data of a run: each sample is a function of the seed, the step and its number.

Token ids       tokens/ (files, rows and chats to ids, kept by content).
Samples         source (which samples a rank sees in which step), corpus (ids as one long array),
                packing and bins (whole documents), preference_data (pairs), blend (several
                sources).
Batches         batches (read ahead in a thread).

train/data_build.py makes these of the configuration.
"""
