"""The numbers of the profile `cluster`, each with where it comes from. All made with them is labelled "emulated".

They stand for hosts in one zone of a public cloud, a job that sets up its communicators, and a reader that is not
local. No single public source has all of them for one cluster, so they don't describe one.
"""

from __future__ import annotations

COLLECTIVE_ALPHA_SECONDS = 500e-6
# One round trip between two hosts of a zone over TCP: https://www.evanjones.ca/network-latencies-2021.html measured for
# 70 hours between cloud machines and calls 500 us "still a good estimate" (about the 80th percentile). One round trip
# is the least that a meeting costs; at many ranks it takes more.

COLLECTIVE_BETA_SECONDS_PER_BYTE = 8 / 10e9
# 10 Gbit/s, the most that a single TCP flow gets between EC2 instances of one placement group:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-network-bandwidth

RENDEZVOUS_SECONDS = 4.5
# Once per process group (init_process_group, each new_group). https://github.com/NVIDIA/nccl/issues/587 reports "about
# 4.5s" for the first all_reduce of a new group of 8 GPUs; https://github.com/NVIDIA/nccl/issues/534 reports 7
# communicators on 16 machines in 41.7 s, which is 6.0 s each; https://github.com/NVIDIA/nccl/issues/1156 reports 2.5
# minutes above some thousand GPUs. Gloo alone, as used here, needs less: this stands for the backend of a GPU job.

FIRST_BATCH_SECONDS = 5.0
# Chosen, not sourced: in each worker of a data loader, before its first sample. For comparison:
# https://github.com/pytorch/pytorch/issues/153594 reports 50 s to the first batch with 16 spawned workers, and
# https://github.com/webdataset/webdataset/issues/267 reports 12 s of metadata requests before the first download.
