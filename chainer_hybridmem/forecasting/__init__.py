"""What an iteration of another batch size, device or node takes, without running it.

* ``estimation``: two recordings in, the profile of any batch size and device out
* ``rank_plans``, ``batches``: plans for several processes on a link, and for the
  largest batch that fits
* ``recording_session``: records the iterations that estimates are made of
* ``batch_estimate``, ``largest_batch``: ``estimate()`` and ``largest_batch()`` of a
  live model
"""
