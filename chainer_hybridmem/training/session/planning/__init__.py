"""Makes plans for guides.

``planning`` says when a guide gets a plan and which recordings it comes from;
``plan_maker`` makes one plan, within the limit and with an arena that fits.
"""
