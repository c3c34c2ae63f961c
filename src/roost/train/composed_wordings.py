"""Wordings of composed prompts: tables of templates and of words that made-up records are made of.

Data only: `{text}` stands for a passage, `{list}` for lines, and so on, as `composed_prompts` fills them in. Every
template was written for this project. Called by nobody; read by `composed_prompts`.
"""

LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch")

SUMMARIES = (
    "Summarise the following text in {length}.\n\n{text}",
    "{text}\n\nWhat is this about? Answer in {length}.",
    "Here is a text:\n\n{text}\n\nGive me a summary of {length}.",
    "TL;DR of this, please, {length}:\n\n{text}",
    "I have no time to read all of this. Tell me what matters, in {length}.\n\n{text}",
    "Write {length} that sum up the text between the lines.\n---\n{text}\n---",
    "Read this carefully and then condense it to {length}.\n\n{text}",
    "Text: {text}\n\nSummary ({length}):",
    "Summarise this for a colleague who has not read it ({length}):\n\n{text}",
    "List the key points of this text, {length}.\n\n{text}",
    "Write a headline and {length} about the following.\n\n{text}",
    "Explain this text to a child in {length}:\n\n{text}",
)
LENGTHS = (
    "one sentence",
    "two sentences",
    "three sentences",
    "one short paragraph",
    "at most fifty words",
    "three bullet points",
    "five bullet points",
    "about a hundred words",
    "two paragraphs",
    "a few lines",
)
MANY_SUMMARIES = (
    "Below are {number} documents. Summarise each of them in {length}.\n\n{text}",
    "{text}\n\nCompare the documents above: what do they have in common, and where do they differ?",
    "Here are some notes from different places.\n\n{text}\n\nPut them together into one summary of {length}.",
    "{text}\n\nFor each document, write its title and {length} on what it says.",
    "Read all {number} documents, then say which is the most surprising and why.\n\n{text}",
)

TRANSLATIONS = (
    "Translate into {language}:\n\n{text}",
    "How would one say this in {language}?\n\n{text}",
    "{text}\n\nTranslate the text above into {language}.",
    "Please give me a {language} version of this. Reply with the translation only.\n\n{text}",
    "You are a translator from English to {language}. Translate:\n{text}",
    "Translate this into {language}, sentence by sentence, with the English before each line.\n\n{text}",
    "Put this into {language} and keep the names as they are:\n\n{text}",
)
NOT_ENGLISH = (
    ("French", "Le train de nuit part à vingt-deux heures et arrive le lendemain matin, s'il n'y a pas de neige."),
    ("French", "Ma grand-mère gardait les lettres dans une boîte en bois, sous l'escalier de la maison."),
    ("French", "Nous cherchons une personne qui sait réparer les vélos et qui aime parler avec les clients."),
    ("Spanish", "El mercado abre a las siete, pero los mejores tomates se acaban antes de las ocho."),
    ("Spanish", "Mi hermano vive cerca del puerto y cada domingo compra pescado para toda la familia."),
    ("Spanish", "La reunión se ha aplazado hasta el jueves porque el director está enfermo."),
    ("German", "Der Zug hatte Verspätung, deshalb haben wir im Bahnhof gefrühstückt und Karten gespielt."),
    ("German", "Bitte schicken Sie uns die Rechnung bis Ende des Monats an die neue Adresse."),
    ("German", "Im Herbst sammeln die Kinder Kastanien und basteln daraus kleine Tiere."),
    ("Italian", "La biblioteca chiude alle sei, ma il giardino resta aperto fino al tramonto."),
    ("Italian", "Ho dimenticato le chiavi in ufficio e ho aspettato mia sorella davanti alla porta."),
    ("Portuguese", "O barco sai todos os dias às nove, menos quando o mar está agitado."),
    ("Dutch", "De winkel op de hoek verkoopt al dertig jaar hetzelfde brood, en het is nog steeds goed."),
)
INTO_ENGLISH = (
    "Translate from {language} into English:\n\n{text}",
    "What does this mean in English?\n\n{text}",
    'A friend wrote to me in {language}: "{text}" What did they say?',
    "{text}\n\nGive an English translation, then explain the grammar of the first sentence.",
)

FACT_QUESTIONS = (
    'Quote the sentence of document {which} that says: "{fragment} ..."',
    'One of the documents contains the words "{fragment}". Which one is it, and what does it say there?',
    "Using document {which} only, answer: who or what is it about?",
    "Copy the first sentence of document {which} word for word.",
    'Find the sentence that begins with "{fragment}" and repeat it exactly.',
    "What does document {which} tell us? Quote the passages that you use.",
    'In which document is "{fragment}" mentioned? Answer with its number and the full sentence.',
)
RETRIEVALS = (
    "Use only the documents below.\n\n{text}\n\n{question}",
    "{question}\n\n{text}",
    "Context:\n{text}\n\nQuestion: {question}\nAnswer:",
    "You are given {number} documents.\n\n{text}\n\nTask: {question}",
    "I searched our archive and found this:\n\n{text}\n\n{question}",
)
RECORD_QUESTIONS = (
    ("What is the {field} of {name}?", True),
    ("Which entry has the {field} {value}? Give the whole line.", True),
    ("Copy the line of {name} exactly.", True),
    ("Where does {name} live, and what do they do? Answer in one sentence.", True),
    ("List the names of all who live in {city}.", False),
    ("How many people are from {city}? Name them.", False),
    ("Repeat the entries from number {number} to the next four, unchanged.", False),
    ("Write the line of {name} as JSON.", True),
)
RECORD_FRAMES = (
    "Here is a list of {count} members.\n\n{list}\n\n{question}",
    "{list}\n\nAnswer from the list above: {question}",
    "Our directory:\n{list}\n\n{question}",
    "{question} Use this data:\n\n{list}",
)

LIST_REWRITES = (
    "Sort this list by {field}:\n\n{list}",
    "Rewrite the following list in reverse order.\n\n{list}",
    "Turn this into a Markdown table:\n\n{list}",
    "Convert to CSV with a header line:\n\n{list}",
    "Write this list as a JSON array of objects. Output JSON only.\n\n{list}",
    "Number these lines and leave everything else as it is.\n\n{list}",
    "Write each entry in capital letters:\n\n{list}",
    "Remove everyone from {city} and give me what remains of this list:\n\n{list}",
    "Replace {name} by {other} and repeat the list:\n\n{list}",
    "Turn each entry into a full sentence:\n\n{list}",
    "Give the same list again, with only the name and the {field} on each line.\n\n{list}",
)
TEXT_REWRITES = (
    "Correct the spelling of this text and change nothing else:\n\n{broken}",
    "Fix all mistakes:\n\n{broken}",
    "Rewrite this so that it is easier to read:\n\n{text}",
    "Rewrite the text in the past tense:\n\n{text}",
    "Make this more formal:\n\n{text}",
    "Make this sound friendlier, and keep all facts:\n\n{text}",
    "Repeat this text with every sentence on a line of its own:\n\n{text}",
    "Turn the text into a list of bullet points, one for each sentence.\n\n{text}",
    "Rewrite this as an email to a customer:\n\n{text}",
    "Continue this text in the same style:\n\n{text}",
    "Repeat the following text exactly as it is:\n\n{text}",
    "Make this half as long:\n\n{text}",
    "Turn this into a dialogue between two people:\n\n{text}",
)
CODE_REWRITES = (
    "Rewrite this code with better names for its variables:\n\n{code}",
    "Add comments and type annotations where they help, and give me the whole code again:\n\n{code}",
    "Here is my code:\n\n{code}\n\nRename everything to snake_case and print the full result.",
    "Add a docstring to each function of this code. Do not change anything else.\n\n{code}",
    "Explain this code line by line:\n\n{code}",
    "Translate this code into JavaScript:\n\n{code}",
    "Write three unit tests for this:\n\n{code}",
    "Is there a bug in this code? If so, give me the corrected version.\n\n{code}",
)

EXTRACTIONS = (
    'Extract all names of people and places from the text as JSON with the keys "people" and "places".\n\n{text}',
    "Read the text and fill in this form. Reply with JSON only.\n\n{schema}\n\nText: {text}",
    "Return a JSON object that matches this schema:\n{schema}\n\nSource:\n{text}",
    'Give me a JSON list of the five most important facts of the text, each with "fact" and "quote".\n\n{text}',
    "{text}\n\nAs JSON: a title, a list of keywords, and a summary of one sentence.",
)
SCHEMAS = (
    '{"title": string, "topic": string, "people": [string], "summary": string}',
    '{"who": string, "what": string, "when": string | null, "where": string | null}',
    '{"type": "object", "properties": {"subject": {"type": "string"}, "dates": {"type": "array", "items": {"type": '
    '"string"}}, "language": {"type": "string"}}, "required": ["subject", "dates", "language"]}',
    '{"headline": string, "keywords": [string], "sentiment": "positive" | "neutral" | "negative"}',
    '{"entities": [{"name": string, "kind": "person" | "place" | "thing", "mentions": integer}]}',
)
RECORD_JSON = (
    "Turn the line into JSON with the keys name, job, city and number:\n{line}",
    "Write {name}'s entry as YAML:\n{line}",
    "Parse these lines into a JSON array:\n{list}",
)

TOOLS = (
    ("get_weather", "the weather of a city", {"city": "string", "day": "string"}),
    ("send_email", "send an email", {"to": "string", "subject": "string", "body": "string"}),
    ("search_web", "search the web", {"query": "string", "results": "integer"}),
    ("add_event", "add an event to the calendar", {"title": "string", "date": "string", "minutes": "integer"}),
    ("convert_money", "convert an amount of money", {"amount": "number", "from": "string", "to": "string"}),
    ("find_member", "look a member up by name", {"name": "string"}),
    ("set_timer", "set a timer", {"minutes": "integer", "label": "string"}),
    ("play_music", "play music", {"artist": "string", "title": "string"}),
    ("book_table", "book a table in a restaurant", {"city": "string", "people": "integer", "time": "string"}),
    ("read_file", "read a file", {"path": "string", "first_line": "integer"}),
)
TOOL_FRAMES = (
    'You can call these functions:\n{tools}\n\nReply with one JSON object {{"name": ..., "arguments": ...}} and '
    "nothing else.\n\nRequest: {request}",
    'Functions:\n{tools}\n\nThe user says: "{request}" Which function do you call? Answer in JSON.',
    "Tools, as JSON:\n{tools}\n\n{request}\nAnswer with a list of calls in JSON, without any other text.",
)
REQUESTS = (
    "What will the weather be like in {city} on {day}?",
    "Send {name} a mail that the meeting on {day} is off.",
    "Put lunch with {name} into my calendar, {day}, {number} minutes.",
    "How much are {number} euros in dollars?",
    "Where does {name} live?",
    "Wake me in {number} minutes.",
    "A table for {small} in {city} on {day} at seven, please.",
    "Find out who discovered oxygen, and mail it to {name}.",
    "Show me the file notes/{city}.txt from line {number} on.",
)

SUBJECTS = (
    "a market on a rainy morning",
    "the history of bridges",
    "how bread is made",
    "a lost dog that finds its way home",
    "why the sea is salty",
    "a city without cars",
    "the work of a nurse at night",
    "learning to play the violin",
    "a library in the mountains",
    "how vaccines work",
    "growing tomatoes on a balcony",
    "an old clockmaker",
    "the phases of the moon",
    "moving to another country",
    "a small business that sells soap",
    "how email is delivered",
    "the life of bees",
    "a train journey through the desert",
    "saving money as a student",
    "how glaciers shape valleys",
    "a robot that learns to paint",
    "cooking for six people",
    "the rules of table tennis",
    "what a database index is",
)
OPENERS = (
    "Write a short text about {subject}.",
    "Explain {subject} in simple words.",
    "Give me five ideas for an article on {subject}.",
    "Write a story about {subject}, at most two hundred words.",
    "Make a plan in seven steps for {subject}.",
    "Write a poem about {subject}.",
    "What should one know about {subject}?",
    "Write a letter in which {name} from {city} tells a friend about {subject}.",
)
FOLLOW_UPS = (
    "Make it shorter.",
    "Translate that into {language}.",
    "Now as JSON.",
    "Explain the second point.",
    "Write it again, more formally.",
    "Put it into a table.",
    "Why?",
    "Give me an example.",
    "Summarise what you said in one sentence.",
    "Rewrite it for a ten-year-old.",
    "And what are the drawbacks?",
    "Turn it into a list with numbers.",
    "Use the name {name} in it.",
    "Make it twice as long.",
    "Repeat the first sentence.",
    "Are you sure? Check it again.",
    "Write a title for it.",
    "Thanks. What would you do next?",
    "Now in the past tense.",
    "Which part matters most?",
    "Write a question about it and answer it.",
    "Say it in other words.",
)

FIRST_NAMES = (
    "Ada",
    "Bruno",
    "Carla",
    "Dario",
    "Elif",
    "Farah",
    "Goran",
    "Hanna",
    "Ivo",
    "Jana",
    "Kofi",
    "Lena",
    "Marek",
    "Nadia",
    "Omar",
    "Petra",
    "Quentin",
    "Rosa",
    "Samir",
    "Tessa",
    "Umar",
    "Vera",
    "Willem",
    "Xenia",
    "Yusuf",
    "Zoe",
)
LAST_NAMES = (
    "Abel",
    "Berger",
    "Castro",
    "Dahl",
    "Eriksen",
    "Fontaine",
    "Greco",
    "Haddad",
    "Ivanov",
    "Jansen",
    "Kowalski",
    "Lindt",
    "Moreau",
    "Novak",
    "Okafor",
    "Petrov",
    "Quist",
    "Rossi",
    "Sato",
    "Tanaka",
    "Ueda",
    "Vogel",
    "Weiss",
    "Yilmaz",
    "Zhang",
)
JOBS = (
    "baker",
    "teacher",
    "engineer",
    "nurse",
    "carpenter",
    "pilot",
    "gardener",
    "lawyer",
    "painter",
    "driver",
    "chemist",
    "editor",
    "plumber",
    "farmer",
    "librarian",
    "surgeon",
    "translator",
    "welder",
)
CITIES = (
    "Lisbon",
    "Oslo",
    "Turin",
    "Ghent",
    "Krakow",
    "Malmo",
    "Porto",
    "Graz",
    "Lyon",
    "Seville",
    "Bergen",
    "Tartu",
    "Basel",
    "Cork",
    "Leeds",
    "Nantes",
    "Zadar",
    "Izmir",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
RECORD_LINES = (
    "{at}. {name}, {job}, {city}, member no. {number}",
    "- {name} ({job}) lives in {city}; number {number}",
    "{name};{job};{city};{number}",
    "{at}) name: {name} | job: {job} | city: {city} | number: {number}",
)
