"""Tests and measurements over ranks: of communication, hangs, slow ranks and right numbers.

Ranks           pool with pool_worker (functions on reused ranks), guarded (a test that may hang).
Communication   comm_checks (data that shows its sender) on calls (ours and torch's),
                comm_test (`test_comm`) with comm_test_report; measure and bench/ (times),
                device_speed (of one device), late/ (a transport that delivers late).
Order of calls  lint/ (`tdp comm lint`: do all ranks make the same calls).
Hangs           watchdog (notices one) and hang/ (says who is to blame).
Slow ranks      stragglers/; of nodes before the first step node_check with node_verdict and
                gpu_facts (nvidia-smi).
Right numbers   parity/ (`tdp prove`: a layout beside one process).
"""
