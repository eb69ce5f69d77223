-- What is used of each limit now. Writes nothing.
if lease and now >= lease then return {'RECLAIM'} end

local _, figures = charged()
return reply('OK', figures)
