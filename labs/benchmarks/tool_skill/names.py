"""Words that asks for tools are made of. What is called unseen is in no training text that has tools."""

from __future__ import annotations

PLACES = (
    "Paris", "London", "Berlin", "Rome", "Tokyo", "Oslo", "Madrid", "Lisbon", "Vienna", "Prague", "Athens", "Dublin",
    "Helsinki", "Warsaw", "Budapest", "Cairo", "Nairobi", "Lagos", "Accra", "Tunis", "Delhi", "Mumbai", "Beijing",
    "Shanghai", "Seoul", "Osaka", "Bangkok", "Hanoi", "Manila", "Jakarta", "Sydney", "Perth", "Auckland", "Toronto",
    "Montreal", "Boston", "Chicago", "Seattle", "Denver", "Dallas", "Miami", "New York", "San Francisco", "Los Angeles",
    "Mexico City", "Lima", "Bogota", "Santiago", "Buenos Aires", "Rio de Janeiro", "Quito", "Havana", "Hamburg",
    "Munich", "Cologne", "Leipzig", "Zurich", "Geneva", "Basel", "Milan", "Naples", "Turin", "Venice", "Lyon",
    "Marseille", "Nice", "Porto", "Seville", "Valencia", "Bergen", "Malmo", "Gothenburg", "Tampere", "Riga", "Vilnius",
    "Tallinn", "Minsk", "Odessa", "Istanbul", "Ankara", "Tehran", "Baghdad", "Dubai", "Doha", "Karachi", "Lahore",
    "Dhaka", "Kathmandu", "Colombo", "Hong Kong", "Taipei", "Kyoto", "Sapporo", "Cape Town", "Durban", "Harare",
    "Lusaka", "Kampala", "Dakar", "Rabat", "France", "Japan", "Brazil", "Kenya", "Canada", "India", "Egypt", "Peru",
    "China", "Spain", "Norway", "Mexico", "Germany", "Italy", "Ghana", "Chile", "Iceland", "Poland", "Turkey", "Iran",
    "München", "Zürich", "São Paulo", "Málaga", "Malmö", "Århus", "Kraków", "Bogotá", "Paris, France", "Tokyo, Japan",
    "Boston, MA", "Austin, TX", "Oslo, Norway", "London, UK", "Berlin, Germany", "Lima, Peru", "Portland, OR",
)  # fmt: skip
UNSEEN_PLACES = (
    "Stockholm", "Copenhagen", "Brussels", "Amsterdam", "Singapore", "Vancouver", "Melbourne", "Barcelona", "Edinburgh",
    "Florence", "Casablanca", "Johannesburg", "Bucharest", "Sofia", "Zagreb", "Reykjavik", "Houston", "Phoenix",
    "Kigali", "Montevideo", "San Diego", "Las Vegas", "Abu Dhabi", "Ottawa", "Glasgow", "Bordeaux", "Córdoba", "Sweden",
    "Portugal", "Vietnam",
)  # fmt: skip
PEOPLE = (
    "Anna", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Liam", "Maria", "Noah",
    "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Xavier", "Yusuf", "Zoe", "Ahmed", "Mei",
    "Ravi", "Ingrid", "José", "Chloé", "Jürgen", "Lucia", "Pedro", "Ali", "Fatima", "Chen", "Yuki", "John", "Mary",
    "Peter", "Susan", "Alice Smith", "John Brown", "Maria Lopez", "Wei Zhang", "Tom Baker",
)  # fmt: skip
UNSEEN_PEOPLE = (
    "Oscar", "Nadia", "Felix", "Greta", "Hugo", "Irene", "Martin", "Sophie", "Diego", "Amara", "Kenji", "Leila",
    "Robert", "Julia", "Simon", "Eva Green",
)  # fmt: skip
PLACE_NOUNS = ("weather", "weather", "time", "temperature", "population")
PLACE_KEYS = ("city", "location")
