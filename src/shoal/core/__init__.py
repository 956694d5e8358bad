"""The heart: tickets, batches, the wait queue, the policy and the scheduler. Standard library only; no I/O, no clock."""
