"""The only threads: tasks, their queues, and the executors that run them."""
