-- What is used of each limit now. Writes nothing.
local _, figures = charged()
return reply('OK', figures)
