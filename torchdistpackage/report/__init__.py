"""Tools to look at a run: `Run` and its pictures. No torch.

run         `Run(folder)`: rows, starts, checkpoints, configuration and state of a run
status      the lines of `tdp watch`
page        one HTML file (`tdp report`) of charts and story, with peaks of devices
placement   ranks on their nodes, drawn with svg
"""
