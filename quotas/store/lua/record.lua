-- A reservation: nine doubles, then the spec of its limits. Requests, input and output asked; input, cached and output
-- booked; days on which it was charged: the first, the last, and how much output late on the last.
local RECORD, DAYS_OFFSET, RECORD_SIZE = '<ddddddddd', 48, 72
