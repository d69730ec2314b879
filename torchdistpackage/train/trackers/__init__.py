"""`log.to`: TensorBoard, Weights & Biases and MLflow, fed from the files of the run folder.

feed            a thread that reads metrics.jsonl as it grows and hands the rows to one tracker
tracker         what a tracker does, and what it keeps of a run between two starts
tensorboard, wandb, mlflow    the three, each the only file that imports its library

The file is the record: a tracker that was away, failed, or lost its rows to a kill gets them from
it, and no step of the training waits for one.
"""
